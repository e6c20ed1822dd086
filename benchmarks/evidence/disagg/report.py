"""The result of `quire bench disagg` as tables. Knows its JSON shape, measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from evidence.disagg.stall import PLAIN, STALLED
from evidence.disagg.turns import OFF, ON, UNIFIED
from quire.bench.report import count_of, new_table
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
    before, after = result["load"]["before"][0], result["load"]["after"][0]
    items.append(f"Load of the machine before and after: {before:.1f}, {after:.1f}.")
    return items


def _turns(part: Result) -> list[RenderableType]:
    plan, sides = part["plan"], part["sides"]
    table = new_table(
        f"{plan['sessions']} sessions of {plan['turns']} turns, "
        f"{plan['shortest']}–{plan['longest']} tokens at first, {plan['added']} more each turn"
    )
    table.add_column("")
    for name in ("TTFT mean, s", "median", "TPOT, ms", "received", "own pages", "of"):
        table.add_column(name, justify="right")
    for side, figures in sides.items():
        table.add_row(
            _NAMES[side],
            f"{figures['ttft_s']['mean']:.3f}",
            f"{figures['ttft_s']['p50']:.3f}",
            f"{figures['tpot_s']['mean'] * 1000:.0f}",
            format_bytes(figures["received_bytes"]) if side != UNIFIED else "–",
            f"{figures['own_pages']:,}",
            f"{figures['pages']:,}",
        )
    sizes = part["bytes"]
    verdict = "exactly" if sizes["exact"] else "[bold red]NOT exactly[/]"
    return [
        table,
        f"The cache saved {sizes['saved_share']:.2%} of the bytes, {verdict} the share of pages "
        f"that decode had itself ({sizes['reused_share']:.2%}).",
        f"Same answer with the cache and without: "
        f"{count_of(part['same_answers'], sides[ON]['requests'])}.",
    ]


def _stall(part: Result) -> list[RenderableType]:
    table = new_table(
        f"Steps of a decode engine, {part['decoding']} requests decoding and {part['looking']} "
        "looking in the store"
    )
    table.add_column("store")
    for name in ("steps", "median, ms", "99 %", "longest", "of all", "store waited for, s"):
        table.add_column(name, justify="right")
    names = {PLAIN: "answers", STALLED: f"stalls {part['stall_s']:g} s"}
    for side, name in names.items():
        row = part["sides"][side]
        table.add_row(
            name,
            f"{row['steps']:,}",
            *(
                f"{row[key] * 1000:,.0f}"
                for key in ("median_s", "p99_s", "longest_s", "longest_of_all_s")
            ),
            f"{row['waited_s']:.2f}",
        )
    ratios = ", ".join(f"{ratio:.2f}" for ratio in part["ratios"])
    return [
        table,
        f"Longest step, stalled by plain: {part['ratio']:.2f} in the median of {part['rounds']} "
        f"rounds ({ratios}); below {part['target']:g} is {_verdict(part['ok'])}.",
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
        f"{_verdict(part['ratio'] < part['target'])}. "
        + ("Every page is right." if part["right"] else "[bold red]Pages arrived wrong.[/]"),
    ]


def _verdict(reached: bool) -> str:
    return "reached" if reached else "[bold red]missed[/]"
