"""The result of `quire bench serve` as tables for people. Knows its JSON shape only."""

from __future__ import annotations

from operator import itemgetter

from rich.console import RenderableType
from rich.markup import escape

from quire.bench import Result
from quire.bench.report import Show, table, text

_NAMES = {"device": "L1", "host": "L2", "store": "L3", "peer": "peer", "cached": "cached"}
_ALWAYS_SHOWN = ("device", "host", "store")
_FIGURES = ("mean", "p50", "p90", "p99")


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


def _latency(result: Result) -> RenderableType:
    rows = [("TTFT, ms", result["ttft_s"]), ("TPOT, ms", result["tpot_s"])]
    return table(None, rows, [("", itemgetter(0)), *((name, _ms(1, name)) for name in _FIGURES)])


def _rounds(result: Result) -> RenderableType:
    tiers = hit_names(result["hit"]) if result["hit"] else []
    return table(
        None,
        [*result["rounds"], {"round": "all", **result}],
        [
            ("round", text("round")),
            ("answers", text("answers")),
            ("tokens", _tokens),
            ("TTFT p50, ms", _ms("ttft_s", "p50")),
            ("p90, ms", _ms("ttft_s", "p90")),
            *((f"in {name}", _hit(tier)) for tier, name in tiers),
            ("hits", _hit("all")),
        ],
        total_below=bool(result["rounds"]),
    )


def _ms(of: str | int, name: str) -> Show:
    return lambda row: "–" if row[of] is None else f"{row[of][name] * 1000:,.0f}"


def _tokens(row: Result) -> str:
    prompt = row["prompt_tokens"]
    return "unknown" if prompt is None else f"{prompt['mean']:,.0f}"


def _hit(tier: str) -> Show:
    return lambda row: "unknown" if row["hit"] is None else f"{row['hit'].get(tier, 0):.1%}"


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
    if not cut["turns"]:
        return []
    return [
        f"Left out: {cut['turns']} turns of {cut['sessions']} sessions that might not fit into "
        f"the model's context of {result['context']:,} tokens, at "
        f"{result['chars_per_token']:.1f} characters per token."
    ]


def _rate(value: float | None) -> str:
    return "an unknown number of" if value is None else f"{value:,.0f}"
