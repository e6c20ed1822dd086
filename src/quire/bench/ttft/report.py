"""The result of `quire bench ttft` as tables for people. Knows its JSON shape, measures nothing.

What a hit in each tier saves is also a table of other benchmarks: `hits_table`.
"""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape

from quire.bench import Result
from quire.bench.report import Show, count_of, number, table
from quire.bench.ttft.run import describe


def tables(result: Result) -> list[RenderableType]:
    hits = result["hits"]
    return [
        escape(describe(result)),
        *hits_table(hits, hits["prompt_tokens"]),
        f"The slowest hit is {hits['slowest_hit_speedup']:.1f} times faster than computing.",
    ]


def hits_table(hits: Result, num_tokens: float, *more: tuple[str, Show]) -> list[RenderableType]:
    """With every sample below. `more`: columns about hits."""

    def of_hit(show: Show) -> Show:
        return lambda row: "" if row["name"] == "cold" else show(row)

    shown = table(
        f"Time to first token of a prompt of {num_tokens:,.0f} tokens",
        [case | {"name": name} for name, case in hits["cases"].items()],
        [
            ("found in", lambda row: "computed" if row["name"] == "cold" else row["name"]),
            ("median, ms", number("ttft_s", 0, 1e-3)),
            ("times faster", of_hit(number("speedup", 1))),
            ("seen", of_hit(lambda row: f"{row['speedup_min']:.1f}–{row['speedup_max']:.1f}")),
            *((name, of_hit(show)) for name, show in more),
            ("right tier", lambda row: count_of(row["as_meant"], row["of"])),
            ("same answer", lambda row: count_of(row["same_answer"], row["of"])),
        ],
    )
    samples = [
        f"  {name:4} "
        + "  ".join(f"{s['ttft_s'] * 1000:,.0f}" for s in hits["samples"] if s["case"] == name)
        for name in hits["cases"]
    ]
    return [shown, "All samples, ms", *samples]
