"""The result of `quire bench schemas` as tables."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from quire.bench.report import new_table


def tables(result: dict[str, Any]) -> list[RenderableType]:
    cost = new_table(f"A token, ms ({result['device']}, load {result['load_average']})")
    for name in ("answers at a time", "plain", "under a schema", "ratio"):
        cost.add_column(name, justify="right")
    for together, row in result["cost"].items():
        cost.add_row(together, f"{row['plain']}", f"{row['held']}", f"{row['ratio']}")
    return [cost, _stall(result["stall_ms"]), *_random(result["random"])]


def _stall(stall: dict[str, Any]) -> Table:
    table = new_table("The longest step of an answer without a schema, ms")
    table.add_column("beside")
    table.add_column("longest", justify="right")
    table.add_column("what became of the schema")
    table.add_row("nothing", f"{stall['alone']}", "")
    for name, row in stall.items():
        if name != "alone":
            became = row["refused"] or f"followed, {row['answer_s']} s"
            table.add_row(name, f"{row['longest_ms']}", became)
    return table


def _random(found: dict[str, Any]) -> list[RenderableType]:
    said = (
        f"{found['valid']} of {found['asked']} answers to random schemas are valid: temperature 1, "
        f"seed {found['seed']}, {found['together']} at a time, {found['tokens']:,} tokens in "
        f"{found['seconds']} s"
    )
    wrong = [
        escape(f"schema {each['number']}: {each['finish']} {each['error']} {each['text']!r}")
        for each in found["wrong"][:8]
    ]
    return [said, *wrong]
