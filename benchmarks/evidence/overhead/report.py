"""The result of `quire bench overhead` as tables. Knows its JSON shape, measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from evidence.cost import cost_table, differences, percent
from evidence.overhead.run import WITH, WITHOUT
from quire.bench.ttft.run import describe


def tables(result: dict[str, Any]) -> list[RenderableType]:
    cost, sides = result["overhead"], {WITH: "L2+L3 on", WITHOUT: "off"}
    pairs = cost["total_s"]["ratio"]["of_pairs"]
    note = (
        f"Pair by pair, the lower tiers cost {percent(pairs['ratio'])} of a request's time "
        f"(95 % interval {percent(pairs['low'])} to {percent(pairs['high'])}). Copies and writes "
        f"end {cost['settled_s']['p50'] * 1000:.0f} ms after the answer."
    )
    shown = cost_table(cost, cost["prompt_tokens"], cost["output_tokens"], sides)
    return [escape(describe(result)), shown, note, *differences(cost)]
