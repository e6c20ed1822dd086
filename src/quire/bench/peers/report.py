"""The result of `quire bench peers` as a table. Measures nothing."""

from __future__ import annotations

from rich.console import RenderableType

from quire.bench.peers.run import ALONE, QUIRE
from quire.bench.report import Result, new_table
from quire.sizes import format_bytes

_NAMES = {
    "new": "never seen",
    "again": "host",
    "batch": "several, never seen",
    "restart": "store, after a restart",
}


def table(result: Result) -> list[RenderableType]:
    shown = new_table("vLLM alone and with Quire, seconds to an answer of one token")
    for name in ("prompt", "tokens", "alone", "Quire", "ratio", "reused", "same"):
        shown.add_column(name, justify="left" if name == "prompt" else "right")
    for case in result["cases"]:
        found = case["ratio"]
        shown.add_row(
            _NAMES[case["what"]],
            str(case["tokens"]),
            f"{case['seconds'][ALONE]['p50']:.3f}",
            f"{case['seconds'][QUIRE]['p50']:.3f}",
            f"{found['ratio']:.2f} ({found['low']:.2f}–{found['high']:.2f})",
            str(sum(case["reused"][QUIRE])),
            "yes" if case["same_tokens"] else "[bold red]NO[/bold red]",
        )
    memory = result["max_rss_bytes"]
    note = (
        f"{result['rounds']} rounds, medians; ratio: median of pairs, with its 95 % interval. "
        f"Largest memory: {format_bytes(memory[ALONE])} alone, {format_bytes(memory[QUIRE])}."
    )
    return [shown, note]
