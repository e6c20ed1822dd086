"""The result of `quire bench pd` as tables. Knows its JSON shape, measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from quire.bench.report import new_table
from quire.sizes import format_bytes

Result = dict[str, Any]
_VERDICTS = {True: "met", False: "[bold red]missed[/]", None: "[yellow]undecided[/]"}


def tables(result: Result) -> list[RenderableType]:
    plan, model = result["plan"], result["model"]
    items: list[RenderableType] = [
        escape(
            f"{plan['model']}: {model['layers']} layers, {format_bytes(model['kv_bytes'])} of "
            f"state a token; {result['device']}, shared by all engines; "
            f"{plan['at_once']} requests at once, answers of {plan['answer']} tokens"
        )
    ]
    if not result["complete"]:
        items.append("[yellow]The time was up before all turns were asked.[/]")
    for added, sides in result["sides"].items():
        items += [_sides(added, sides), _compared(added, result["compared"][added])]
    items += [_handovers(result["handovers"]), _rates(result), _asked(result["asked"])]
    items.append(f"Load before and after: {result['load'][0]:.1f}, {result['load_after'][0]:.1f}.")
    if not result["ok"]:
        items.append("[bold red]Bytes came another way, or a side without a cache had some.[/]")
    return items


def _sides(added: str, sides: Result) -> RenderableType:
    table = new_table(f"{added} new tokens a turn")
    table.add_column("")
    columns = ("turns", "later", "TTFT later, ms", "P99", "TPOT", "TTFT all", "P99")
    for name in columns:
        table.add_column(name, justify="right")
    for name, side in sides.items():
        later, tpot, whole = side["ttft_later_s"], side["tpot_later_s"], side["ttft_s"]
        table.add_row(
            name,
            str(side["turns"]),
            str(side["later_turns"]),
            *(_ms(part, key) for part, key in ((later, "mean"), (later, "p99"), (tpot, "mean"))),
            *(_ms(whole, key) for key in ("mean", "p99")),
        )
    return table


def _ms(part: Result | None, key: str) -> str:
    return "–" if part is None else f"{part[key] * 1000:,.1f}"


def _compared(added: str, pairs: Result) -> RenderableType:
    table = new_table(f"{added} new tokens a turn: ratios, 95 % intervals")
    table.add_column("")
    for name in ("TTFT mean", "TTFT P99", "TPOT", "all turns: mean", "P99"):
        table.add_column(name, justify="right")
    for name, pair in pairs.items():
        later, whole = pair["later_turns"], pair["all_turns"]
        cells = [(later, key) for key in ("ttft_mean", "ttft_p99", "tpot_mean")]
        cells += [(whole, key) for key in ("ttft_mean", "ttft_p99")]
        table.add_row(name, *(_ratio(part and part[key]) for part, key in cells))
    return table


def _ratio(found: Result | None) -> str:
    return "–" if not found else f"{found['ratio']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


def _handovers(sides: Result) -> RenderableType:
    table = new_table("Hand-overs, from the first word to the last page")
    table.add_column("")
    for name in ("count", "mean, ms", "received"):
        table.add_column(name, justify="right")
    for name, part in sides.items():
        mean = "–" if part["mean_s"] is None else f"{part['mean_s'] * 1000:,.1f}"
        table.add_row(name, str(part["handovers"]), mean, format_bytes(part["received_bytes"]))
    return table


def _rates(result: Result) -> RenderableType:
    copy = result["copy_bytes_s"] / 1e9
    table = new_table(f"Bytes; a plain copy from host to device: {copy:.1f} GB/s")
    for name in ("", "bytes", "fastest, ms", "GB/s", "of the copy"):
        table.add_column(name, justify="right" if name else "left")
    parts = {"{}, workers alone": result["bytes"], "{}, to the first token": result["rates"]}
    for name, rows in parts.items():
        for transport, row in rows.items():
            table.add_row(
                name.format(transport),
                format_bytes(int(row["bytes"])),
                f"{min(row['seconds']) * 1000:,.1f}",
                f"{row['bytes_s'] / 1e9:.1f}",
                f"{row['of_copy']:.0%}",
            )
    return table


def _asked(rows: list[Result]) -> RenderableType:
    table = new_table("Asked")
    for name in ("what", "found", "asked", ""):
        table.add_column(name)
    for row in rows:
        found = row["found"]
        text = f"{found:.2f}" if isinstance(found, float) else _ratio(found)
        table.add_row(escape(row["what"]), text, row["asked"], _VERDICTS[row["met"]])
    return table
