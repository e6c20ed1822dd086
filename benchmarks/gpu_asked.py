"""What is asked of an engine on one H200, beside what `quire bench gpu` has measured there.

    quire bench gpu --save FILE
    python benchmarks/gpu_asked.py FILE

Each figure is a ratio to a floor, to a plain copy or to another measurement of the same run, except
times that people wait. Limits are those for models of 8 billion parameters: for others, and
elsewhere, they are a yardstick, and nothing fails by them.
"""

import json
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import print as show
from rich.console import RenderableType

from quire.bench.gpu.plan import GpuPart
from quire.bench.gpu.sets import later
from quire.bench.report import table, text

Result = dict[str, Any]

_MANY = 64
"""Requests at once, of which more is asked than of one."""
_LONG_TOKENS = 32768
_PROMPTS_S = {(32768, 8192): 1.4, (32768, 2048): 1.5}
"""Tokens and chunk; a prompt in one chunk is asked for a share of its floor."""


@dataclass(frozen=True, slots=True)
class Figure:
    part: str
    name: str
    asked: float
    got: float
    at_least: bool
    """Or at most."""
    unit: str = "%"
    """%: of a share; s, ms: of seconds or milliseconds; ×: times."""
    met: bool = False

    def judged(self) -> Result:
        compare = operator.ge if self.at_least else operator.le
        return asdict(self) | {"met": compare(self.got, self.asked)}


def judge(result: Result) -> list[Result]:
    """Of the parts that were measured."""
    parts: dict[GpuPart, Callable[[Any], Iterator[Figure]]] = {
        GpuPart.DECODE: _decode,
        GpuPart.PREFILL: _prompts,
        GpuPart.MIXED: _mixed,
        GpuPart.COPIES: _copies,
        GpuPart.HITS: _hits,
        GpuPart.CROSSOVER: _crossover,
        GpuPart.SETS: _sets,
    }
    found = [(part, figures) for part, figures in parts.items() if part.value in result]
    return [figure.judged() for part, figures in found for figure in figures(result[part.value])]


def _decode(rows: list[Result]) -> Iterator[Figure]:
    for row in rows:
        where = f"{row['batch']} × {row['context']:,}"
        least = 0.75 if row["batch"] >= _MANY else 0.7
        yield Figure(GpuPart.DECODE, f"{where}: of the floor", least, row["share_of_floor"], True)
        drawn = row["drawn_ms"] / row["greedy_ms"]
        yield Figure(GpuPart.DECODE, f"{where}: drawn ÷ greedy", 1.08, drawn, False, "×")


def _prompts(rows: list[Result]) -> Iterator[Figure]:
    for row in rows:
        where = f"{row['tokens']:,} by {row['chunk']:,}"
        limit_s = _PROMPTS_S.get((row["tokens"], row["chunk"]))
        if limit_s is not None:
            yield Figure(GpuPart.PREFILL, where, limit_s, row["ms"] / 1e3, False, "s")
        elif row["tokens"] <= row["chunk"]:
            name = f"{where}: of the floor"
            yield Figure(GpuPart.PREFILL, name, 0.7, row["share_of_floor"], True)


def _mixed(rows: list[Result]) -> Iterator[Figure]:
    for row in rows:
        where = f"{row['tokens']:,} by {row['chunk']:,} beside {row['batch']}"
        name = f"{where}: slowest token ÷ its chunk"
        yield Figure(GpuPart.MIXED, name, 1.0, row["times_chunk"], False, "×")


def _copies(found: Result) -> Iterator[Figure]:
    for row in found["link"]:
        name = f"{row['way']}, pages of {row['page_size']}, {row['order']}: of plain"
        least = 0.85 if row["way"] == "both" else 0.92
        yield Figure(GpuPart.COPIES, name, least, row["share"], True)
    for row in found["beside"]:
        for way in ("load", "backup", "both"):
            name = f"{row['batch']} × {row['context']:,} beside {way}: slower"
            yield Figure(GpuPart.COPIES, name, 0.05, row[f"{way}_slower"], False)
    for row in found["fresh"]:
        name = f"nothing reused, {row['tiers']}: of throughput without"
        yield Figure(GpuPart.COPIES, name, 0.99, row["share"], True)


def _hits(rows: list[Result]) -> Iterator[Figure]:
    for row in rows:
        where = f"{row['tokens']:,}"
        yield Figure(GpuPart.HITS, f"{where} on the device", 15.0, row["device_ms"], False, "ms")
        name = f"{where} on the device and {row['more_tokens']} more"
        yield Figure(GpuPart.HITS, name, 15.0, row["more_ms"], False, "ms")
        if row["tokens"] == _LONG_TOKENS and "host_ms" in row:
            times = row["host_ms"] / row["floor_ms"]
            yield Figure(GpuPart.HITS, f"{where} on the host: ÷ floor", 1.25, times, False, "×")
            gain = row["computed_ms"] / row["host_ms"]
            yield Figure(GpuPart.HITS, f"{where} on the host: computed ÷ it", 10.0, gain, True, "×")


def _crossover(found: Result) -> Iterator[Figure]:
    yield Figure(GpuPart.CROSSOVER, "the choice was right", 0.95, found["right_share"], True)
    yield Figure(GpuPart.CROSSOVER, "the better way ÷ both", 1.3, found["best_gain"], True, "×")


def _sets(rows: list[Result]) -> Iterator[Figure]:
    """Six times the throughput, or a first token in a fifth of the time: the nearer one."""
    alone = {row["times_device"]: row for row in rows if row["tiers"] == "L1"}
    for row in rows:
        base = alone.get(row["times_device"])
        if base is None or base is row or row["times_device"] <= 1 or not _holds_all(row):
            continue
        first = later(row, "ttft_s") / later(base, "ttft_s")
        gain = later(row, "requests_s") / later(base, "requests_s")
        where = f"{row['times_device']:.1f} × the device, {row['tiers']}"
        if gain >= 6 or gain / 6 > 0.2 / first:
            yield Figure(GpuPart.SETS, f"{where}: throughput", 6.0, gain, True, "×")
        else:
            yield Figure(GpuPart.SETS, f"{where}: first token", 0.2, first, False)


def _holds_all(row: Result) -> bool:
    """Of the set: the host does, or there is a store."""
    return "half" not in row["tiers"] or "L3" in row["tiers"]


def asked_table(result: Result) -> RenderableType:
    figures = judge(result)
    met = sum(figure["met"] for figure in figures)
    return table(
        f"Asked of {result['shape']} on one H200: {met} of {len(figures)} met",
        figures,
        [
            ("part", text("part")),
            ("figure", text("name")),
            ("asked", lambda row: f"{'≥' if row['at_least'] else '≤'} {_in_unit(row, 'asked')}"),
            ("got", lambda row: _in_unit(row, "got")),
            ("met", lambda row: "yes" if row["met"] else "[bold red]no[/]"),
        ],
        names=0,
    )


def _in_unit(row: Result, name: str) -> str:
    if row["unit"] == "%":
        return f"{row[name]:.1%}"
    return f"{row[name]:.2f} {row['unit']}"


def main() -> None:
    for result in json.loads(Path(sys.argv[1]).read_text())["shapes"]:
        show(asked_table(result))


if __name__ == "__main__":
    main()
