"""The result of `quire bench pd` as tables. Knows its JSON shape, measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from quire.bench.report import Show, interval, number, share, size, table, text
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
    return table(
        f"{added} new tokens a turn",
        _named(sides),
        [
            ("", text("name")),
            ("turns", text("turns")),
            ("later", text("later_turns")),
            ("TTFT later, ms", _ms("ttft_later_s", "mean")),
            ("P99", _ms("ttft_later_s", "p99")),
            ("TPOT", _ms("tpot_later_s", "mean")),
            ("TTFT all", _ms("ttft_s", "mean")),
            ("P99", _ms("ttft_s", "p99")),
        ],
    )


def _named(rows: Result) -> list[Result]:
    return [row | {"name": name} for name, row in rows.items()]


def _ms(part: str, key: str) -> Show:
    return lambda row: "–" if row[part] is None else f"{row[part][key] * 1000:,.1f}"


def _compared(added: str, pairs: Result) -> RenderableType:
    def ratio(turns: str, key: str) -> Show:
        return lambda pair: interval(pair[turns] and pair[turns][key])

    return table(
        f"{added} new tokens a turn: ratios, 95 % intervals",
        _named(pairs),
        [
            ("", text("name")),
            ("TTFT mean", ratio("later_turns", "ttft_mean")),
            ("TTFT P99", ratio("later_turns", "ttft_p99")),
            ("TPOT", ratio("later_turns", "tpot_mean")),
            ("all turns: mean", ratio("all_turns", "ttft_mean")),
            ("P99", ratio("all_turns", "ttft_p99")),
        ],
    )


def _handovers(sides: Result) -> RenderableType:
    def mean(part: Result) -> str:
        return "–" if part["mean_s"] is None else f"{part['mean_s'] * 1000:,.1f}"

    return table(
        "Hand-overs, from the first word to the last page",
        _named(sides),
        [
            ("", text("name")),
            ("count", text("handovers")),
            ("mean, ms", mean),
            ("received", size("received_bytes")),
        ],
    )


def _rates(result: Result) -> RenderableType:
    parts = {"workers alone": result["bytes"], "to the first token": result["rates"]}
    return table(
        f"Bytes; a plain copy from host to device: {result['copy_bytes_s'] / 1e9:.1f} GB/s",
        [
            row | {"name": f"{transport}, {what}"}
            for what, rows in parts.items()
            for transport, row in rows.items()
        ],
        [
            ("", text("name")),
            ("bytes", size("bytes")),
            ("fastest, ms", lambda row: f"{min(row['seconds']) * 1000:,.1f}"),
            ("GB/s", number("bytes_s", 1, 1e9)),
            ("of the copy", share("of_copy")),
        ],
    )


def _asked(rows: list[Result]) -> RenderableType:
    def found(row: Result) -> str:
        value = row["found"]
        return f"{value:.2f}" if isinstance(value, float) else interval(value)

    return table(
        "Asked",
        rows,
        [
            ("what", lambda row: escape(row["what"])),
            ("found", found),
            ("asked", text("asked")),
            ("", lambda row: _VERDICTS[row["met"]]),
        ],
        names=4,
    )
