"""`quire bench core` of this working tree against an earlier commit, in one run.

Two processes, one per version and both on the same core, are asked in turn for the same workload,
so that both meet the same noise; counted is processor time. The workloads are those of the
benchmark in small, so that there can be many rounds. Reported per workload: the median of the
ratios of neighbouring rounds with its 95 % interval, and the ratio of the fastest rounds. In the
same way what importing takes, in milliseconds, each time in a new process.

    python benchmarks/core_against.py COMMIT [ROUNDS] > core_against.json
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKLOADS = (
    "chat(sessions=240, active=24, device_tokens=120_000)",
    "longdoc(documents=20, device_tokens=650_000)",
    "chat(sessions=240, active=240, device_tokens=120_000)",
)
IMPORTS = ("quire.store", "quire.cli.app")
NUM_RESAMPLES = 2000
SERVER = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
time.perf_counter = time.thread_time  # not what else runs on the machine
from quire.bench.core import chat, longdoc, measure
for line in sys.stdin:
    workload, store = line.rsplit(maxsplit=1)
    print(measure(eval(workload), store=store == "store")["us_per_request"], flush=True)
"""
IMPORT = """
import sys, time
import numpy  # not ours
began_s = time.process_time()
__import__(sys.argv[1])
print((time.process_time() - began_s) * 1e3)
"""


class Version:
    """One version's benchmark, in a process of its own."""

    def __init__(self, source: Path) -> None:
        self._env = {**os.environ, "PYTHONPATH": str(source)}
        self._child = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, question: str) -> float:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(question + "\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())

    def importing(self, package: str) -> float:
        words = [sys.executable, "-c", IMPORT, package]
        return float(
            subprocess.run(words, env=self._env, check=True, stdout=subprocess.PIPE).stdout
        )

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


def main(commit: str, rounds: int) -> None:
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder) / "earlier"
        subprocess.run(
            [*git, "worktree", "add", "-q", "--detach", str(earlier), commit], check=True
        )
        versions = [Version(earlier / "src"), Version(ROOT / "src")]
        try:
            result: dict[str, object] = {"against": commit, "rounds": rounds}
            questions = [f"{each} {store}" for each in WORKLOADS for store in ("store", "none")]
            result["workloads"] = {
                each: _compare("us_per_request", [v.measure for v in versions], each, rounds)
                for each in questions
            }
            result["imports"] = {
                each: _compare("ms", [v.importing for v in versions], each, rounds)
                for each in IMPORTS
            }
            print(json.dumps(result, indent=2))
        finally:
            for version in versions:
                version.close()
            subprocess.run([*git, "worktree", "remove", "--force", str(earlier)], check=True)


def _compare(
    unit: str, asks: list[Callable[[str], float]], question: str, rounds: int
) -> dict[str, object]:
    print(question, file=sys.stderr, flush=True)
    samples: list[list[float]] = [[], []]
    for number in range(rounds):
        # Who comes first changes, so that a machine that slows down favours neither.
        for which in (0, 1) if number % 2 else (1, 0):
            samples[which].append(asks[which](question))
    before, after = samples
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    low, high = _interval(ratios)
    return {
        unit: [min(before), min(after)],
        "ratio_of_fastest": round(min(after) / min(before), 3),
        "median_of_ratios": round(statistics.median(ratios), 3),
        "interval_95": [round(low, 3), round(high, 3)],
        "samples": samples,
    }


def _interval(ratios: list[float]) -> tuple[float, float]:
    """Of the median, by resampling."""
    rng = random.Random(1)
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES)
    )
    return medians[NUM_RESAMPLES // 40], medians[-NUM_RESAMPLES // 40]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40)
