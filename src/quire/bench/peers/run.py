"""Rounds of the same prompts to vLLM alone, with Quire and with LMCache, in turn. Knows no vLLM.

    new       a prompt that nobody has seen: what a cache costs
    again     the same after vLLM has forgotten it: what a hit on the host saves
    batch     several new ones at once, with answers: throughput with nothing reused
    restart   prompts of earlier rounds, after all engines were started again: Quire has them in its
              store, LMCache in its server, which goes on

Every side answers every prompt; the one that begins changes from round to round. Tokens must be the
same on all sides.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.peers.lmcache import LmcacheServer
from quire.bench.stats import ratio, summary
from quire.errors import ConfigError
from quire.progress import Progress

ALONE, QUIRE, LMCACHE = "vllm", "vllm+quire", "vllm+lmcache"
MAX_MODEL_LEN = 2048
BATCH, BATCH_TOKENS, BATCH_ANSWER = 4, 96, 8
VOCABULARY = range(1000, 40000)

"""What, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Plan:
    python: Path
    """Of the environment that has vLLM, and Quire."""
    model: Path
    lengths: tuple[int, ...] = (256, 1024)
    """Of prompts, in tokens."""
    rounds: int = 4
    host_gib: int = 1
    lmcache: bool = True

    @property
    def sides(self) -> tuple[str, ...]:
        return (ALONE, QUIRE, LMCACHE) if self.lmcache else (ALONE, QUIRE)


class Side:
    """One engine's process, and what it said."""

    def __init__(self, plan: Plan, name: str, transfer: dict[str, Any] | None) -> None:
        self.name = name
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
        self._tell(model=str(plan.model), max_model_len=MAX_MODEL_LEN, transfer=transfer)

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
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-peers-")))
        transfers: dict[str, dict[str, Any] | None] = {ALONE: None, QUIRE: _quire(plan, folder)}
        server: LmcacheServer | None = None
        if plan.lmcache:
            server = LmcacheServer(plan.python, plan.host_gib, folder / "lmcache.log")
            stack.enter_context(closing(server))
            server.ready()
            transfers[LMCACHE] = server.transfer
        with _sides(plan, transfers) as sides:
            for number in range(plan.rounds + 1):
                progress("rounds", number, plan.rounds + 1)
                prompts = [_prompt(chance, length) for length in plan.lengths]
                batch = [_prompt(chance, BATCH_TOKENS) for _ in range(BATCH)]
                turn = number % len(sides)
                order = sides[turn:] + sides[:turn]
                rounds.append({side.name: _round(side, prompts, batch) for side in order})
                last = prompts
        progress("rounds", plan.rounds + 1, plan.rounds + 1)
        with _sides(plan, transfers) as sides:
            restart = {side.name: [side.ask([one]) for one in last] for side in sides}
        extra_bytes = {LMCACHE: server.max_rss_bytes} if server is not None else {}
    return _result(plan, rounds[1:], restart, extra_bytes)  # the first is a warm-up


def _quire(plan: Plan, store: Path) -> dict[str, Any]:
    return {
        "kv_connector": "QuireConnector",
        "kv_connector_module_path": "quire.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_memory": f"{plan.host_gib}GiB",
            "store": f"file://{store}/quire?max=4GiB",
        },
    }


@contextmanager
def _sides(plan: Plan, transfers: dict[str, dict[str, Any] | None]) -> Iterator[list[Side]]:
    sides: list[Side] = []
    try:
        for name, transfer in transfers.items():
            sides.append(Side(plan, name, transfer))
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
    plan: Plan,
    rounds: list[dict[str, dict[str, Any]]],
    restart: dict[str, list[dict[str, Any]]],
    extra_bytes: dict[str, int],
) -> dict[str, Any]:
    """`extra_bytes`: of processes beside the engine's."""
    sides, cases = plan.sides, list[dict[str, Any]]()
    for what in ("new", "again"):
        for at, length in enumerate(plan.lengths):
            found = [{side: one[side][what][at] for side in sides} for one in rounds]
            cases.append(_case(what, length, found))
    cases.append(
        _case("batch", BATCH_TOKENS, [{s: one[s]["batch"] for s in sides} for one in rounds])
    )
    for at, length in enumerate(plan.lengths):
        cases.append(_case("restart", length, [{side: restart[side][at] for side in sides}]))
    memory = {side: rounds[-1][side]["batch"]["max_rss_bytes"] for side in sides}
    return {
        "rounds": plan.rounds,
        "load_average": os.getloadavg()[0],
        "cases": cases,
        "max_rss_bytes": {side: memory[side] + extra_bytes.get(side, 0) for side in sides},
        "same_tokens": all(all(case["same_tokens"].values()) for case in cases),
    }


def _case(what: str, length: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """`found`: by round, what each side answered."""
    sides = list(found[0])
    seconds = {side: [one[side]["seconds"] for one in found] for side in sides}
    others = [side for side in sides if side != QUIRE]
    return {
        "what": what,
        "tokens": length,
        "seconds": {side: summary(values) for side, values in seconds.items()},
        "ratio": {side: ratio(seconds[QUIRE], seconds[side])["of_pairs"] for side in others},
        "reused": {side: found[-1][side]["reused"] for side in sides},
        "same_tokens": {
            side: all(one[side]["tokens"] == one[ALONE]["tokens"] for one in found)
            for side in sides
            if side != ALONE
        },
    }
