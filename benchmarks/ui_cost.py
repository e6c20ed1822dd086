"""What being looked at costs an engine: the same work with `/ui` open and `quire top` running, and
without, in turn.

    python benchmarks/ui_cost.py [PAIRS [SECONDS]] > ui_cost.json

A real server of the embedded model on this machine. A round is four new prompts answered at
once; every other round is watched: by what the page asks every 1.5 seconds, with the admin key,
and by a `quire top` of its own process. Of each round the engine's processor time, and the time it
took, in which those who watch use the same cores. (Threads of the engine that wait for each other
sleep: else they would spin longer when others use the cores.) Printed: the ratio of each, watched
by not, as the median over pairs of neighbouring rounds with an interval; of as many pairs as the
seconds allow.
"""

import contextlib
import json
import os
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

PROMPTS, AT_A_TIME, PROMPT_TOKENS, ANSWER_TOKENS = 4, 4, 160, 24
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
            env=os.environ | {"QUIRE_ADMIN_KEY": KEY, "OMP_WAIT_POLICY": "passive"},
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


@contextlib.contextmanager
def watched(url: str, folder: Path) -> Iterator[None]:
    """A page that is open, and a terminal."""
    script = folder / "page.py"
    script.write_text(PAGE)
    with (folder / "top").open("w") as terminal:
        page = subprocess.Popen([sys.executable, str(script), url, KEY, str(PAGE_EVERY_S)])
        top = subprocess.Popen([sys.executable, "-m", "quire", "top", url], stdout=terminal)
        time.sleep(1.0)  # until both have started: their start is nobody's cost
        try:
            yield
            assert page.poll() is None, "the page has stopped looking"
            assert top.poll() is None, "quire top has ended"
        finally:
            for each in (page, top):
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

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(ask, range(PROMPTS)))


def timed(url: str, engine: psutil.Process, number: int) -> dict[str, float]:
    def used_s() -> float:
        times = engine.cpu_times()
        return times.user + times.system

    began, used = time.perf_counter(), used_s()
    work(url, number)
    return {"engine_cpu_s": used_s() - used, "wall_s": time.perf_counter() - began}


def main() -> None:
    pairs, limit_s = [float(each) for each in (*sys.argv[1:], *("24", "360")[len(sys.argv) - 1 :])]
    until_s = time.monotonic() + limit_s
    rounds: dict[str, list[dict[str, float]]] = {"watched": [], "alone": []}
    load = [os.getloadavg()[0]]
    with server() as (url, engine), tempfile.TemporaryDirectory() as folder:
        for warm in range(2):
            work(url, warm)
        number = 2
        for pair in range(int(pairs)):
            if time.monotonic() > until_s:
                break
            for kind in ("watched", "alone") if pair % 2 else ("alone", "watched"):
                around = watched(url, Path(folder)) if kind == "watched" else _nothing()
                with around:
                    rounds[kind].append(timed(url, engine, number))
                number += 1
    load.append(os.getloadavg()[0])
    result = {
        name: ratio(*([each[name] for each in rounds[kind]] for kind in ("watched", "alone")))
        for name in ("engine_cpu_s", "wall_s")
    }
    count = len(rounds["alone"])
    print(json.dumps({"pairs": count, "load": load, "ratio": result, "rounds": rounds}, indent=1))


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    time.sleep(1.0)  # as long as whoever watches needs to start
    yield


if __name__ == "__main__":
    main()
