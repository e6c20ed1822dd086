"""`quire bench gpu` as tables for people: every figure beside its floor."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from quire.bench.report import new_table

Result = dict[str, Any]


def tables(result: Result) -> list[RenderableType]:
    machine = result["machine"]
    return [
        f"{result['shape']}, random weights, bfloat16, on {machine['name']}: memory "
        f"{machine['memory_bytes_s'] / 1e12:.2f} TB/s, matrices "
        f"{machine['matmul_ops_s'] / 1e12:.0f} TFLOP/s, link "
        f"{machine['link_bytes_s'] / 1e9:.1f} GB/s",
        _decode(result["decode"]),
        _prompts(result["prompts"]),
        _hits(result["hits"]),
    ]


def _decode(rows: list[Result]) -> RenderableType:
    table = new_table("Decoding: ms from token to token")
    for name in (
        "requests",
        "context",
        "greedy",
        "floor",
        "of the floor",
        "drawn",
        "drawn ÷ greedy",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            f"{row['context']:,}",
            f"{row['greedy_ms']:.2f}",
            f"{row['floor_ms']:.2f}",
            f"{row['share_of_floor']:.0%}",
            f"{row['drawn_ms']:.2f}",
            f"{row['drawn_ms'] / row['greedy_ms']:.2f}",
        )
    return table


def _prompts(rows: list[Result]) -> RenderableType:
    table = new_table("Prompts: ms to the first token")
    for name in ("tokens", "chunk", "took", "floor", "of the floor", "TFLOP/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['chunk']:,}",
            f"{row['ms']:.0f}",
            f"{row['floor_ms']:.0f}",
            f"{row['share_of_floor']:.0%}",
            f"{row['tflops']:.0f}",
        )
    return table


def _hits(rows: list[Result]) -> RenderableType:
    table = new_table("Hits: ms to the first token, by where the prompt was")
    for name in ("tokens", "nowhere", "device", "host", "host's floor", "store"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['computed_ms']:.0f}",
            f"{row['device_ms']:.1f}",
            f"{row['host_ms']:.1f}",
            f"{row['floor_ms']:.1f}",
            f"{row['store_ms']:.1f}",
        )
    return table
