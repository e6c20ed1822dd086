"""The result of `quire bench serve` as tables for people. Knows its JSON shape only."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from quire.bench.report import new_table

Result = dict[str, Any]

_NAMES = {"device": "L1", "host": "L2", "store": "L3", "peer": "peer", "cached": "cached"}
_ALWAYS_SHOWN = ("device", "host", "store")
_PERCENTILES = ("mean", "p50", "p90", "p99")


def tables(result: Result) -> list[RenderableType]:
    about = escape(f"{result['model']} at {result['url']}\n{describe(result)}")
    return [about, _latency(result), _rounds(result), *_notes(result)]


def hit_names(hit: dict[str, float]) -> list[tuple[str, str]]:
    """(tier, its name for people), in order; less usual ones only if there were hits in them."""
    shown = [tier for tier in _NAMES if tier in hit and (tier in _ALWAYS_SHOWN or hit[tier])]
    return [(tier, _NAMES[tier]) for tier in shown]


def describe(result: Result) -> str:
    """The workload in one line."""
    return (
        f"{result['workload']}: {result['num_sessions']} sessions, {result['requests']} requests, "
        f"{result['concurrency']} at a time"
    )


def _latency(result: Result) -> Table:
    table = new_table()
    table.add_column("")
    for name in _PERCENTILES:
        table.add_column(name, justify="right")
    for name, key in (("TTFT, ms", "ttft_s"), ("TPOT, ms", "tpot_s")):
        table.add_row(name, *_milliseconds(result[key]))
    return table


def _rounds(result: Result) -> Table:
    tiers = hit_names(result["hit"]) if result["hit"] else []
    table = new_table()
    table.add_column("round")
    for name in ("answers", "tokens", "TTFT p50, ms", "p90, ms"):
        table.add_column(name, justify="right")
    for _, name in tiers:
        table.add_column(f"in {name}", justify="right")
    table.add_column("hits", justify="right")
    for row in [*result["rounds"], {"round": "all", **result}]:
        hit, ttft = row["hit"], row["ttft_s"]
        prompt = row["prompt_tokens"]
        table.add_row(
            str(row["round"]),
            str(row["answers"]),
            "unknown" if prompt is None else f"{prompt['mean']:,.0f}",
            *(_milliseconds(ttft)[i] for i in (1, 2)),
            *("unknown" if hit is None else f"{hit.get(tier, 0):.1%}" for tier, _ in tiers),
            "unknown" if hit is None else f"{hit['all']:.1%}",
            end_section=row is result["rounds"][-1] if result["rounds"] else False,
        )
    return table


def _notes(result: Result) -> list[RenderableType]:
    rates = result["throughput"]
    notes = [
        f"{_rate(rates['input_tokens_per_s'])} prompt and "
        f"{_rate(rates['output_tokens_per_s'])} answer tokens per second "
        f"over {result['duration_s']:.1f} s."
    ]
    if result["hit"] is None:
        notes.append("The server does not say what it found in its cache: hit rates are unknown.")
    notes += _reuse(result.get("reuse")) + _cut(result)
    for verdict, colour in (("failed", "yellow"), ("malformed", "bold red")):
        if result[verdict]:
            notes.append(f"[{colour}]{result[verdict]} of {result['requests']} {verdict}.[/]")
    notes += [f"  {count} × {escape(problem)}" for problem, count in result["problems"].items()]
    return list(notes)


def _reuse(reuse: Result | None) -> list[str]:
    if reuse is None:
        return []
    if reuse["share"] is None:
        return ["The server does not say which tokens it saw: what could be reused is unknown."]
    notes = [
        f"Reused: {reuse['share']:.1%} of the {reuse['possible_tokens']:,} tokens that could be, "
        f"over {reuse['turns']} requests."
    ]
    for broken in reuse["broken"]:
        notes.append(
            f"  {broken['tokens']:,} more were lost in {broken['turns']} turns: {broken['reason']}."
        )
    return notes


def _cut(result: Result) -> list[str]:
    cut = result["cut"]
    notes = []
    if cut["turns"]:
        notes.append(
            f"Left out: {cut['turns']} turns of {cut['sessions']} sessions that might not fit into "
            f"the model's context of {result['context']:,} tokens, at "
            f"{result['chars_per_token']:.1f} characters per token."
        )
    if cut["answers"]:
        notes.append(
            f"{cut['answers']} recorded answers are longer than the {result['output_tokens']} "
            "tokens asked for."
        )
    return notes


def _milliseconds(figures: dict[str, float] | None) -> list[str]:
    if figures is None:
        return ["–"] * len(_PERCENTILES)
    return [f"{figures[name] * 1000:,.0f}" for name in _PERCENTILES]


def _rate(value: float | None) -> str:
    return "an unknown number of" if value is None else f"{value:,.0f}"
