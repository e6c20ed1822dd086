"""What being looked at costs an engine: the same work with `/ui` open and `quire top` running, and
without, in turn.

    python benchmarks/ui_cost.py [SECONDS] > ui_cost.json

A real server of the embedded model on this machine, its engine on one thread, so that those who
look have a core of their own, as they have on a server. What the page asks every 1.5 seconds, with
the admin key, and a `quire top` run all the time, and are stopped (SIGSTOP) in every other round. A
round is four new prompts answered at once; what it moves to host and store is waited for. Two
figures come of it:

- `busy`: the engine's processor time, and the time it took, watched by not: the median over pairs
  of neighbouring rounds, with an interval. The noise of a shared machine is a few per cent.
- `idle`: the processor time that the engine takes in a second of being watched, beside a second of
  not, with all that was cached before and nothing to compute: the looks alone, without the noise.
  What is answered then is what is answered under load.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from quire.bench.stats import ratio

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 80, 12
SETTLE_S = 0.3
IDLE_S, IDLE_PAIRS = 10.0, 4
PAGE_EVERY_S = 1.5
KEY = "an admin key of this benchmark"
MODEL = "SmolLM2-135M-Instruct"


@contextlib.contextmanager
def server() -> Iterator[tuple[str, psutil.Process]]:
    """Its address, and its engine's process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "quire", "serve", "--port", "0"]
        command += ["--store", f"file://{folder}/store?max=2GiB"]
        started = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"QUIRE_ADMIN_KEY": KEY, "QUIRE_THREADS": "1"},
        )
        assert started.stdout is not None
        try:
            url = next(line for line in started.stdout if "is ready at" in line).split()[-1]
            (engine,) = psutil.Process(started.pid).children()
            yield url, engine
        finally:
            started.terminate()
            started.wait()
            started.stdout.close()


class Watching:
    """A page that is open, and a terminal: they look, or are stopped."""

    def __init__(self, url: str, folder: Path) -> None:
        script = folder / "page.py"
        script.write_text(PAGE)
        with (folder / "top").open("w") as terminal:
            page = [sys.executable, str(script), url, KEY, str(PAGE_EVERY_S)]
            top = [sys.executable, "-m", "quire", "top", url]
            self._both = [subprocess.Popen(page), subprocess.Popen(top, stdout=terminal)]
        time.sleep(5.0)  # their start is nobody's cost

    def look(self, wanted: bool) -> None:
        for each in self._both:
            assert each.poll() is None, f"{each.args} has ended"
            each.send_signal(signal.SIGCONT if wanted else signal.SIGSTOP)

    def close(self) -> None:
        for each in self._both:
            each.kill()
            each.wait()


PAGE = """
import sys, time, httpx
url, key, every_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
keyed = {"authorization": f"Bearer {key}"}
with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
    while True:
        for path in ("/health", "/metrics", "/admin/requests", "/admin/tree"):
            client.get(path, headers=keyed).raise_for_status()
        time.sleep(every_s)
"""


def work(url: str, number: int) -> None:
    def ask(i: int) -> None:
        first = 1000 + 7919 * (number * PROMPTS + i)
        body = {
            "model": MODEL,
            "prompt": [(first + 31 * j) % 40_000 + 100 for j in range(PROMPT_TOKENS)],
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
        assert answer.json()["usage"]["completion_tokens"] == ANSWER_TOKENS

    with ThreadPoolExecutor(PROMPTS) as pool:
        list(pool.map(ask, range(PROMPTS)))


def used_s(engine: psutil.Process) -> float:
    times = engine.cpu_times()
    return times.user + times.system


def timed(url: str, engine: psutil.Process, number: int) -> dict[str, float]:
    began, used = time.perf_counter(), used_s(engine)
    work(url, number)
    took = time.perf_counter() - began
    time.sleep(SETTLE_S)
    return {"engine_cpu_s": used_s(engine) - used, "wall_s": took}


def idle_share(engine: psutil.Process) -> float:
    """Of a second, the engine's processor time."""
    began, used = time.perf_counter(), used_s(engine)
    time.sleep(IDLE_S)
    return (used_s(engine) - used) / (time.perf_counter() - began)


def in_turn(number: int) -> tuple[str, str]:
    """So that neither kind is always the first of a pair."""
    return ("watched", "alone") if number % 2 else ("alone", "watched")


def main() -> None:
    until_s = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else "330")
    rounds: dict[str, list[dict[str, float]]] = {"watched": [], "alone": []}
    idle: dict[str, list[float]] = {"watched": [], "alone": []}
    load = [os.getloadavg()[0]]
    with (
        server() as (url, engine),
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Watching(url, Path(folder))) as watching,
    ):
        work(url, 0)
        number, pair = 1, 0
        while time.monotonic() < until_s - IDLE_PAIRS * 2 * IDLE_S:
            for kind in in_turn(pair):
                watching.look(kind == "watched")
                rounds[kind].append(timed(url, engine, number))
                number += 1
            pair += 1
        for i in range(IDLE_PAIRS):
            for kind in in_turn(i):
                watching.look(kind == "watched")
                idle[kind].append(idle_share(engine))
        watching.look(True)
    load.append(os.getloadavg()[0])
    busy = {
        name: ratio(*([each[name] for each in rounds[kind]] for kind in ("watched", "alone")))[
            "of_pairs"
        ]
        for name in ("engine_cpu_s", "wall_s")
    }
    added = [ours - theirs for ours, theirs in zip(idle["watched"], idle["alone"], strict=True)]
    result = {
        "pairs": pair,
        "load": load,
        "busy": busy,
        "idle": {"share": statistics.median(added), "low": min(added), "high": max(added)},
        "rounds": rounds,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
