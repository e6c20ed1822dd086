"""The result of `quire bench disagg` as tables. Knows its JSON shape, measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from evidence.disagg.stall import PLAIN, STALLED
from evidence.disagg.turns import OFF, ON, UNIFIED
from evidence.targets import reached
from quire.bench.report import count_of, load, number, size, table, text
from quire.sizes import format_bytes

Result = dict[str, Any]

_NAMES = {ON: "decode, cache on", OFF: "decode, cache off", UNIFIED: "unified"}


def tables(result: Result) -> list[RenderableType]:
    items: list[RenderableType] = [
        escape(f"{result['model']} on {result['cores']} cores, all engines on this machine")
    ]
    if "turns" in result:
        items += _turns(result["turns"])
    if "stall" in result:
        items += _stall(result["stall"])
    if "restore" in result:
        items += _restore(result["restore"])
    items.append(load(result["load"]["before"][0], result["load"]["after"][0]))
    return items


def _turns(part: Result) -> list[RenderableType]:
    plan, sides, received = part["plan"], part["sides"], size("received_bytes")
    shown = table(
        f"{plan['sessions']} sessions of {plan['turns']} turns, "
        f"{plan['shortest']}–{plan['longest']} tokens at first, {plan['added']} more each turn",
        [figures | {"side": side} for side, figures in sides.items()],
        [
            ("", lambda row: _NAMES[row["side"]]),
            ("TTFT mean, s", lambda row: f"{row['ttft_s']['mean']:.3f}"),
            ("median", lambda row: f"{row['ttft_s']['p50']:.3f}"),
            ("TPOT, ms", lambda row: f"{row['tpot_s']['mean'] * 1000:.0f}"),
            ("received", lambda row: "–" if row["side"] == UNIFIED else received(row)),
            ("own pages", number("own_pages")),
            ("of", number("pages")),
        ],
    )
    sizes = part["bytes"]
    verdict = "exactly" if sizes["exact"] else "[bold red]NOT exactly[/]"
    return [
        shown,
        f"The cache saved {sizes['saved_share']:.2%} of the bytes, {verdict} the share of pages "
        f"that decode had itself ({sizes['reused_share']:.2%}).",
        f"Same answer with the cache and without: "
        f"{count_of(part['same_answers'], sides[ON]['requests'])}.",
    ]


def _stall(part: Result) -> list[RenderableType]:
    names = {PLAIN: "answers", STALLED: f"stalls {part['stall_s']:g} s"}
    shown = table(
        f"Steps of a decode engine, {part['decoding']} requests decoding and {part['looking']} "
        "looking in the store",
        [part["sides"][side] | {"name": name} for side, name in names.items()],
        [
            ("store", text("name")),
            ("steps", number("steps")),
            ("median, ms", number("median_s", 0, 1e-3)),
            ("99 %", number("p99_s", 0, 1e-3)),
            ("longest", number("longest_s", 0, 1e-3)),
            ("of all", number("longest_of_all_s", 0, 1e-3)),
            ("store waited for, s", number("waited_s", 2)),
        ],
    )
    ratios = ", ".join(f"{ratio:.2f}" for ratio in part["ratios"])
    return [
        shown,
        f"Longest step, stalled by plain: {part['ratio']:.2f} in the median of {part['rounds']} "
        f"rounds ({ratios}); below {part['target']:g} is {reached(part['ok'])}.",
    ]


def _restore(part: Result) -> list[RenderableType]:
    layout = part["layout"]
    return [
        f"{part['sessions']} sessions of {part['tokens']:,} tokens, {format_bytes(part['bytes'])} "
        f"on the host ({layout['layers']} layers, {layout['dtype']}, pages of "
        f"{layout['page_size']}), restored at once on {part['device']}: "
        f"{part['restore_s'] * 1000:,.0f} ms; one plain copy of the same bytes: "
        f"{part['plain_s'] * 1000:,.0f} ms ({part['plain_gb_per_s']:.1f} GB/s).",
        f"Ratio {part['ratio']:.2f} of the fastest, {part['ratio_of_pairs']:.2f} in the median of "
        f"rounds ({part['ratio_min']:.2f}–{part['ratio_max']:.2f}); below {part['target']:g} is "
        f"{reached(part['ratio'] < part['target'])}. "
        + ("Every page is right." if part["right"] else "[bold red]Pages arrived wrong.[/]"),
    ]
