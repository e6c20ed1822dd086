"""What something costs when nothing is reused: a side that has it and one that does not, asked the
same new prompts in turns. Their samples summed up, and as tables; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from quire.bench.report import Show, table, text
from quire.bench.stats import ratio, summary

Result = dict[str, Any]

_ROWS = (
    ("request, s", "total_s"),
    ("first token, s", "ttft_s"),
    ("CPU time, s", "cpu_s"),
)
_KINDS = {"medians": "of_medians", "pairs": "of_pairs"}


def summed_up(rounds: Sequence[Result], having: str, lacking: str) -> Result:
    """Of rounds that name a sample of each side, with the times above, `cached_tokens` and the
    `answer`, and who was `first`."""

    def column(side: str, name: str) -> list[Any]:
        return [one[side][name] for one in rounds]

    def compared(name: str) -> Result:
        ours, theirs = column(having, name), column(lacking, name)
        return {having: summary(ours), lacking: summary(theirs), "ratio": ratio(ours, theirs)}

    reused = sum(column(having, "cached_tokens") + column(lacking, "cached_tokens"))
    same = sum(one[having]["answer"] == one[lacking]["answer"] for one in rounds)
    return {
        "rounds": len(rounds),
        "ok": same == len(rounds) and reused == 0,
        "same_answer": same,
        "reused_tokens": reused,
        **{name: compared(name) for _, name in _ROWS},
        "samples": [
            {"first": one["first"]} | {side: _figures(one[side]) for side in (having, lacking)}
            for one in rounds
        ],
    }


def _figures(sample: Result) -> Result:
    return {name: value for name, value in sample.items() if name != "answer"}


def cost_table(
    cost: Result, num_tokens: int, output_tokens: int, sides: Mapping[str, str]
) -> RenderableType:
    """`sides`: with and without, and how they are called."""

    def middle(side: str) -> Show:
        return lambda row: f"{row[side]['p50']:.3f}"

    def share(kind: str) -> Show:
        return lambda row: percent(row["ratio"][kind]["ratio"])

    def interval(row: Result) -> str:
        pairs = row["ratio"]["of_pairs"]
        return f"{percent(pairs['low'])[:-2]} … {percent(pairs['high'])}"

    return table(
        f"Nothing reused: {cost['rounds']} unique prompts of {num_tokens:,} tokens, "
        f"{output_tokens} generated",
        [cost[key] | {"name": name} for name, key in _ROWS],
        [
            ("", text("name")),
            *((name, middle(side)) for side, name in sides.items()),
            *((name, share(kind)) for name, kind in _KINDS.items()),
            ("95 % interval", interval),
        ],
    )


def differences(cost: Result) -> list[RenderableType]:
    """What makes the figures worthless."""
    items: list[RenderableType] = []
    if cost["same_answer"] != cost["rounds"]:
        items.append(f"[bold red]{cost['rounds'] - cost['same_answer']} answers differ.[/]")
    if cost["reused_tokens"]:
        items.append(f"[bold red]{cost['reused_tokens']} tokens were reused after all.[/]")
    return items


def percent(share: float) -> str:
    return f"{(share - 1) * 100:+.1f} %"
