"""What being looked at costs an engine: the same work with `/ui` open and `quire top` running, and
without, in turn.

    python benchmarks/ui_cost.py [SECONDS] > ui_cost.json

A real server of the embedded model on this machine, its engine on one thread and on a core of its
own: its server, those who ask and those who look are on the others, so that what they do to a
core's caches is not counted as the engine's. A round is four new prompts answered at once; what it
moves to host and store is waited for. In turn nobody looks (`alone`); what the page asks every 1.5
seconds, with the admin key, and a `quire top` do (`watched`); the same two look at another server,
which has nothing else to do (`elsewhere`); and as many looks in a tenth of the time, each of which
is answered anew (`eager`). Those who do not look are stopped (SIGSTOP). Four figures:

- `watched`: the processor time of the engine, that of its server, and the time it took, by
  `elsewhere`: the median over neighbouring rounds, with an interval. On the cores beside the
  engine's as much happens in both, so what is left is what this engine does for those who look.
- `beside`: the same of `elsewhere` by `alone`: what two busy processes on the other cores cost an
  engine that nobody asks anything. The noise of a shared machine is a few per cent in each.
- `share`: what looking adds to the engine's processor time: a tenth of what the eager looks add,
  and so is the noise.
- `idle_share`: the processor time that the engine takes in a second of being watched, less that in
  a second of not, with all that was cached and nothing to compute; so also with ten pages open.

It takes as many seconds as are given, by default five and a half minutes, and ends with a sentence
on standard error: whether `watched` is below 1 %, which it is if its whole interval is. On a
machine that others use as well the interval is wide, and may decide nothing; nor does a run of less
than twenty rounds, or one in which being watched seems to spare more than that.
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
from typing import Any

import httpx
import psutil

from quire.bench.stats import ratio

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 80, 12
SETTLE_S = 0.3
IDLE_S, IDLE_ROUNDS = 10.0, 3
FEWEST_ROUNDS = 2
FEWEST_TO_TELL = 20
"""Rounds of each kind: of fewer the interval says little."""
KINDS = ("alone", "watched", "elsewhere", "eager")
IDLE_KINDS = ("watched", "ten", "alone")
TEN = 10
"""Pages that are open at once."""
EAGER = 10
"""Times as many looks."""
MOST = 0.01
"""Of the engine's processor time, that being looked at may take."""
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


def cores() -> tuple[set[int], set[int]]:
    """The engine's, and everybody else's: of one core, the same."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def pin(process: int, to: set[int]) -> None:
    for task in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(task.name), to)


class Watching:
    """A page that is open, and a terminal, of this server or of another; and somebody who looks as
    often as ten of both."""

    def __init__(self, url: str, another: str, folder: Path) -> None:
        self._folder = folder
        (folder / "page.py").write_text(PAGE)
        self._by_kind = {
            "watched": [self._page(url, PAGE_EVERY_S), self._top(url)],
            "elsewhere": [self._page(another, PAGE_EVERY_S), self._top(another)],
            "ten": [self._page(url, PAGE_EVERY_S, pages=TEN)],
            "eager": [self._page(url, PAGE_EVERY_S / EAGER, as_top=True)],
            "alone": [],
        }
        time.sleep(5.0)  # their start is nobody's cost

    def _page(
        self, url: str, every_s: float, *, pages: int = 1, as_top: bool = False
    ) -> subprocess.Popen[bytes]:
        said = [url, KEY, str(every_s), str(pages), str(int(as_top))]
        return subprocess.Popen([sys.executable, str(self._folder / "page.py"), *said])

    def _top(self, url: str) -> subprocess.Popen[bytes]:
        with (self._folder / "top").open("a") as terminal:
            return subprocess.Popen([sys.executable, "-m", "quire", "top", url], stdout=terminal)

    def look(self, kind: str) -> None:
        """Only those of this kind."""
        for other, processes in self._by_kind.items():
            for each in processes:
                assert each.poll() is None, f"{each.args} has ended"
                each.send_signal(signal.SIGCONT if other == kind else signal.SIGSTOP)

    def close(self) -> None:
        for each in (each for processes in self._by_kind.values() for each in processes):
            each.kill()
            each.wait()


PAGE = """
import sys, threading, time, httpx
url, key, every_s, pages, as_top = sys.argv[1:]
every_s, pages, as_top = float(every_s), int(pages), as_top == "1"
keyed = {"authorization": f"Bearer {key}", "cache-control": "max-age=1"}
if as_top:  # each of them is to be answered anew: that is what is counted
    del keyed["cache-control"]
paths = ["/health", "/metrics", "/admin/requests", "/admin/tree"] + ["/metrics"] * as_top
def look():
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        while True:
            for path in paths:
                client.get(path, headers=keyed).raise_for_status()
            time.sleep(every_s)
for _ in range(pages):
    threading.Thread(target=look).start()
    time.sleep(every_s / pages)
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


def used_s(process: int) -> float:
    """Processor time of all its threads, to the nanosecond."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def timed(url: str, engine: psutil.Process, number: int) -> dict[str, float]:
    processes = {"engine_cpu_s": engine.pid, "server_cpu_s": engine.ppid()}
    used = {name: used_s(process) for name, process in processes.items()}
    began = time.perf_counter()
    work(url, number)
    took = time.perf_counter() - began
    time.sleep(SETTLE_S)
    return {name: used_s(process) - used[name] for name, process in processes.items()} | {
        "wall_s": took
    }


def idle_share(engine: psutil.Process) -> float:
    """Of a second, the engine's processor time."""
    began, used = time.perf_counter(), used_s(engine.pid)
    time.sleep(IDLE_S)
    return (used_s(engine.pid) - used) / (time.perf_counter() - began)


def verdict(result: dict[str, Any]) -> str:
    watched, share = result["watched"]["engine_cpu_s"], result["share"]
    is_sound = result["rounds_of_each"] >= FEWEST_TO_TELL and watched["high"] >= 1 - MOST
    if is_sound and watched["high"] < 1 + MOST:
        decided = "is shown"
    elif is_sound and watched["low"] > 1 + MOST:
        decided = "is not so"
    else:
        decided = "is undecided: measure for longer, or on a quieter machine"
    return (
        f"Watched, the engine takes {_interval(watched, 1)} more processor time, in "
        f"{result['rounds_of_each']} rounds of each kind; as reckoned from {EAGER} times as many "
        f"looks, {_interval(share, 0)}. At a load of {result['load'][0]:.1f} before and "
        f"{result['load'][1]:.1f} after. Less than {MOST:.0%} {decided}."
    )


def _interval(found: dict[str, float], nothing: float) -> str:
    each = (f"{100 * (found[name] - nothing):+.2f}" for name in ("ratio", "low", "high"))
    return "{} % (95 % interval {} to {} %)".format(*each)


def main() -> None:
    until_s = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else "330")
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    idle: dict[str, list[float]] = {kind: [] for kind in IDLE_KINDS}
    load = [os.getloadavg()[0]]
    with contextlib.ExitStack() as stack:
        url, engine = stack.enter_context(server())
        another, _ = stack.enter_context(server())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        engines, others = cores()
        for process in psutil.Process().children(recursive=True):
            pin(process.pid, engines if process == engine else others)
        pin(os.getpid(), others)  # and so whoever is started from here
        watching = stack.enter_context(contextlib.closing(Watching(url, another, Path(folder))))
        work(url, 0)
        number = 0
        last_s = until_s - IDLE_ROUNDS * len(IDLE_KINDS) * IDLE_S
        while number < FEWEST_ROUNDS * len(KINDS) or time.monotonic() < last_s:
            for kind in KINDS if len(rounds["alone"]) % 2 else reversed(KINDS):
                watching.look(kind)
                number += 1
                rounds[kind].append(timed(url, engine, number))
        for _ in range(IDLE_ROUNDS):
            for kind, shares in idle.items():
                watching.look(kind)
                shares.append(idle_share(engine))
    load.append(os.getloadavg()[0])

    def compared(kind: str, by: str, name: str) -> dict[str, float]:
        return ratio(*([each[name] for each in rounds[of]] for of in (kind, by)))["of_pairs"]

    names = list(rounds["alone"][0])
    eager = compared("eager", "alone", "engine_cpu_s")
    added = {
        kind: [ours - theirs for ours, theirs in zip(idle[kind], idle["alone"], strict=True)]
        for kind in ("watched", "ten")
    }
    result = {
        "rounds_of_each": len(rounds["alone"]),
        "load": load,
        "watched": {name: compared("watched", "elsewhere", name) for name in names},
        "beside": {name: compared("elsewhere", "alone", name) for name in names},
        "share": {name: (value - 1) / EAGER for name, value in eager.items()},
        "idle_share": {kind: statistics.median(shares) for kind, shares in added.items()},
        "idle": idle,
        "rounds": rounds,
    }
    print(json.dumps(result, indent=1))
    print(verdict(result), file=sys.stderr)


if __name__ == "__main__":
    main()
