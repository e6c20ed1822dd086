"""Rounds of the same prompts to vLLM alone and to vLLM with Quire, in turn. Knows no vLLM.

    new       a prompt that nobody has seen: what a cache costs
    again     the same after vLLM has forgotten it: what a hit on the host saves
    batch     several new ones at once, with answers: throughput with nothing reused
    restart   prompts of earlier rounds, after all engines were started again: the store

Every side answers every prompt; the one that begins changes from round to round. Tokens must be the
same on all sides.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.stats import ratio, summary
from quire.errors import ConfigError

ALONE, QUIRE = "vllm", "vllm+quire"
SIDES = (ALONE, QUIRE)
MAX_MODEL_LEN = 2048
BATCH, BATCH_TOKENS, BATCH_ANSWER = 4, 96, 8
VOCABULARY = range(1000, 40000)

Progress = Callable[[str, int, int], None]
"""What, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Plan:
    python: Path
    """Of the environment that has vLLM, and Quire."""
    model: Path
    lengths: tuple[int, ...] = (256, 1024)
    """Of prompts, in tokens."""
    rounds: int = 4
    host_memory: str = "1GiB"


class Side:
    """One engine's process, and what it said."""

    def __init__(self, plan: Plan, name: str, store: Path) -> None:
        self.name = name
        extra = {"host_memory": plan.host_memory, "store": f"file://{store}?max=4GiB"}
        transfer = {
            "kv_connector": "QuireConnector",
            "kv_connector_module_path": "quire.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        command = [str(plan.python), "-m", "quire.bench.peers.engine"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise ConfigError(f"{plan.python} cannot be run: {error.strerror}") from error
        self._tell(
            model=str(plan.model),
            max_model_len=MAX_MODEL_LEN,
            transfer=transfer if name == QUIRE else None,
        )

    def ready(self) -> None:
        """Wait until its engine is built."""
        self._hear()

    def ask(self, prompts: list[list[int]], max_tokens: int = 1) -> dict[str, Any]:
        self._tell(do="ask", prompts=prompts, max_tokens=max_tokens)
        return self._hear()

    def forget(self) -> None:
        self._tell(do="forget")
        self._hear()

    def close(self) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError):
            stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stdout.close()

    def _tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # that it has ended is heard
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(
                f"{self.name} ended: does {self._process.args!r} run by hand? It needs vLLM and "
                "Quire in one environment, as `make test-vllm` makes it"
            )
        found: dict[str, Any] = json.loads(line)
        return found


def run(plan: Plan, progress: Progress) -> dict[str, Any]:
    chance = random.Random(1)
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="quire-peers-") as folder:
        with _sides(plan, Path(folder)) as sides:
            for number in range(plan.rounds + 1):
                progress("rounds", number, plan.rounds + 1)
                prompts = [_prompt(chance, length) for length in plan.lengths]
                batch = [_prompt(chance, BATCH_TOKENS) for _ in range(BATCH)]
                order = sides if number % 2 else sides[::-1]
                rounds.append({side.name: _round(side, prompts, batch) for side in order})
                last = prompts
        progress("rounds", plan.rounds + 1, plan.rounds + 1)
        with _sides(plan, Path(folder)) as sides:
            restart = {side.name: [side.ask([one]) for one in last] for side in sides}
    return _result(plan, rounds[1:], restart)  # the first is a warm-up


@contextmanager
def _sides(plan: Plan, store: Path) -> Iterator[list[Side]]:
    sides: list[Side] = []
    try:
        for name in SIDES:
            sides.append(Side(plan, name, store))
            sides[-1].ready()
        yield sides
    finally:
        for side in sides:
            side.close()


def _prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.choice(VOCABULARY) for _ in range(length)]


def _round(side: Side, prompts: list[list[int]], batch: list[list[int]]) -> dict[str, Any]:
    new = [side.ask([prompt]) for prompt in prompts]
    side.forget()
    again = [side.ask([prompt]) for prompt in prompts]
    several = side.ask(batch, BATCH_ANSWER)
    side.forget()
    return {"new": new, "again": again, "batch": several}


def _result(
    plan: Plan, rounds: list[dict[str, dict[str, Any]]], restart: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    for what in ("new", "again"):
        for at, length in enumerate(plan.lengths):
            cases.append(_case(what, length, [{s: r[s][what][at] for s in SIDES} for r in rounds]))
    cases.append(_case("batch", BATCH_TOKENS, [{s: r[s]["batch"] for s in SIDES} for r in rounds]))
    for at, length in enumerate(plan.lengths):
        cases.append(_case("restart", length, [{s: restart[s][at] for s in SIDES}]))
    memory = {side: rounds[-1][side]["batch"]["max_rss_bytes"] for side in SIDES}
    return {
        "rounds": plan.rounds,
        "cases": cases,
        "max_rss_bytes": memory,
        "same_tokens": all(case["same_tokens"] for case in cases),
    }


def _case(what: str, length: int, pairs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = {side: [pair[side]["seconds"] for pair in pairs] for side in SIDES}
    return {
        "what": what,
        "tokens": length,
        "seconds": {side: summary(values) for side, values in seconds.items()},
        "ratio": ratio(seconds[QUIRE], seconds[ALONE])["of_pairs"],
        "reused": {side: pairs[-1][side]["reused"] for side in SIDES},
        "same_tokens": all(pair[QUIRE]["tokens"] == pair[ALONE]["tokens"] for pair in pairs),
    }
