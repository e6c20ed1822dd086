"""The result of `quire bench speculate` as tables. Knows its JSON shape, measures nothing."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape

from quire.bench import Result
from quire.bench.report import load, number, table, text


def tables(result: Result) -> list[RenderableType]:
    items: list[RenderableType] = [escape(_describe(result))]
    for workload in result["workloads"]:
        items.append(
            table(
                f"{workload['name']}: {workload['prompts']} prompts",
                [row | {"way": way} for way, row in workload["ways"].items()],
                [
                    ("way", text("way")),
                    ("tokens/s", number("tokens_per_s", 1)),
                    ("ratio", number("ratio", 2)),
                    ("tokens a step", number("tokens_per_step", 2)),
                    ("accepted, by position", _accepted),
                    ("same", lambda row: "yes" if row["same_answers"] else "no"),
                ],
            )
        )
    items.append(load(result["load"]["before"][0], result["load"]["after"][0]))
    return items


def _accepted(row: Result) -> str:
    shares = [
        f"{accepted / proposed:.0%}" if proposed else "–"
        for proposed, accepted in zip(row["proposed"], row["accepted"], strict=True)
    ]
    return " ".join(shares) or "–"


def _describe(result: Result) -> str:
    text = (
        f"{result['model']} in {result['dtype']} on {result['device']}, {result['threads']} "
        f"threads, {result['at_once']} at once; drafts of up to {result['draft_tokens']} tokens, "
        f"answers of {result['answer_tokens']}, greedy"
    )
    if result["imposed_acceptance"] is not None:
        text += (
            f". IMPOSED: {result['imposed_acceptance']:.0%} of proposals are let through, whatever "
            "the model says"
        )
    return text
