"""The result of `quire bench ttft` as tables for people. Knows its JSON shape, measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from quire.bench.report import count_of, new_table, percent, verdict
from quire.bench.ttft.overhead import WITH, WITHOUT
from quire.bench.ttft.run import describe

Result = dict[str, Any]

_WRONG = "[bold red]"
_ROWS = (
    ("request, s", "total_s"),
    ("first token, s", "ttft_s"),
    ("CPU time, s", "cpu_s"),
)


def tables(result: Result) -> list[RenderableType]:
    items: list[RenderableType] = [escape(describe(result))]
    if "hits" in result:
        items += _hits(result["hits"], result["targets"]["speedup"])
    if "overhead" in result:
        items += _overhead(result["overhead"], result["targets"]["overhead"])
    return items


def _hits(hits: Result, target: float) -> list[RenderableType]:
    title = f"Time to first token of a prompt of {hits['prompt_tokens']:,.0f} tokens"
    table = new_table(title)
    table.add_column("found in")
    for name in ("median, ms", "times faster", "seen", "right tier", "same answer"):
        table.add_column(name, justify="right")
    for name, case in hits["cases"].items():
        is_cold = name == "cold"
        table.add_row(
            "computed" if is_cold else name,
            f"{case['ttft_s'] * 1000:,.0f}",
            "" if is_cold else f"{case['speedup']:.1f}",
            "" if is_cold else f"{case['speedup_min']:.1f}–{case['speedup_max']:.1f}",
            count_of(case["as_meant"], case["of"]),
            count_of(case["same_answer"], case["of"]),
        )
    slowest = hits["slowest_hit_speedup"]
    reached = "reached" if slowest >= target else "[bold red]missed[/]"
    samples = [
        f"  {name:4} {'  '.join(f'{value * 1000:,.0f}' for value in case['all_ttft_s'])}"
        for name, case in hits["cases"].items()
    ]
    note = f"The slowest hit is {slowest:.1f} times faster than computing; {target:g} is {reached}."
    return [table, "All samples, ms", *samples, note]


def _overhead(cost: Result, target: float) -> list[RenderableType]:
    title = (
        f"Nothing reused: {cost['rounds']} unique prompts of {cost['prompt_tokens']:,} tokens, "
        f"{cost['output_tokens']} generated"
    )
    table = new_table(title)
    table.add_column("")
    for name in ("L2+L3 on", "off", "medians", "means", "pairs", "95 % interval"):
        table.add_column(name, justify="right")
    for name, key in _ROWS:
        row = cost[key]
        pairs = row["ratio"]["of_pairs"]
        table.add_row(
            name,
            f"{row[WITH]['p50']:.3f}",
            f"{row[WITHOUT]['p50']:.3f}",
            *(percent(row["ratio"][kind]["ratio"]) for kind in ("of_medians", "of_means")),
            percent(pairs["ratio"]),
            f"{percent(pairs['low'])[:-2]} … {percent(pairs['high'])}",
        )
    pairs = cost["total_s"]["ratio"]["of_pairs"]
    note = (
        f"Pair by pair, the lower tiers cost {percent(pairs['ratio'])} of a request's time "
        f"(95 % interval {percent(pairs['low'])} to {percent(pairs['high'])}). "
        f"At most {target * 100:g} % is {verdict(pairs, target)}. Copies and writes end "
        f"{cost['settled_s']['p50'] * 1000:.0f} ms after the answer."
    )
    items: list[RenderableType] = [table, note]
    if cost["same_answer"] != cost["rounds"]:
        items.append(f"{_WRONG}{cost['rounds'] - cost['same_answer']} answers differ.[/]")
    if cost["reused_tokens"]:
        items.append(f"{_WRONG}{cost['reused_tokens']} tokens were reused after all.[/]")
    return items
