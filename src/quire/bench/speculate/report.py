"""The result of `quire bench speculate` as tables. Knows its JSON shape, measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from quire.bench.report import new_table

Result = dict[str, Any]


def tables(result: Result) -> list[RenderableType]:
    items: list[RenderableType] = [escape(_describe(result))]
    for workload in result["workloads"]:
        table = new_table(f"{workload['name']}: {workload['prompts']} prompts")
        for name in ("way", "tokens/s", "ratio", "tokens a step", "accepted, by position", "same"):
            table.add_column(name, justify="left" if name == "way" else "right")
        for way, row in workload["ways"].items():
            shares = [
                f"{accepted / proposed:.0%}" if proposed else "–"
                for proposed, accepted in zip(row["proposed"], row["accepted"], strict=True)
            ]
            table.add_row(
                way,
                f"{row['tokens_per_s']:.1f}",
                f"{row['ratio']:.2f}",
                f"{row['tokens_per_step']:.2f}",
                " ".join(shares) or "–",
                "yes" if row["same_answers"] else "no",
            )
        items.append(table)
    before, after = result["load"]["before"][0], result["load"]["after"][0]
    items.append(f"Load of the machine before and after: {before:.1f}, {after:.1f}.")
    return items


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
