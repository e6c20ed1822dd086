"""The same prompts to vLLM alone, with Quire and with LMCache, in turn. Knows no vLLM.

    new       a prompt that nobody has seen: what a cache costs
    again     the same after vLLM has forgotten it: what a hit on the host saves
    batch     several new ones at once, with answers: throughput with nothing reused
    turn      the next turn of a recorded session, of which all but the new words is on the host;
              by how much that is
    restart   prompts from before, after all engines were started again: Quire has them in its
              store, LMCache in its server, which goes on

Every side answers every prompt, one after the other, in an order that changes from prompt to
prompt. What a side has left to save it saves before the next one is asked, LMCache's server too,
but for a batch, whose first prompts are saved beside its last ones. Tokens must be the same on all
sides.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

from quire.bench.peers.lmcache import LmcacheServer
from quire.bench.peers.rest import wait_for_rest
from quire.bench.peers.sessions import PromptIds
from quire.bench.stats import ratio, summary
from quire.errors import ConfigError
from quire.progress import Progress

ALONE, QUIRE, LMCACHE = "vllm", "vllm+quire", "vllm+lmcache"
MAX_MODEL_LEN = 4096
BATCH, BATCH_TOKENS, BATCH_ANSWER, AT_ONCE = 8, 192, 8, 4
VOCABULARY = range(1000, 40000)
HIT_TOKENS = (0, 1024, 2048)
"""Turns are grouped by what of them was there before: from so many tokens on."""

_Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PeersPlan:
    python: Path
    """Of the environment that has vLLM, and Quire."""
    model: Path
    lengths: tuple[int, ...] = (256, 1024)
    """Of prompts, in tokens."""
    rounds: int = 8
    sessions: tuple[list[PromptIds], ...] = ()
    host_gib: int = 1
    lmcache: bool = True

    @property
    def sides(self) -> tuple[str, ...]:
        return (ALONE, QUIRE, LMCACHE) if self.lmcache else (ALONE, QUIRE)


class EngineSide:
    """One engine's process, and what it said."""

    def __init__(self, plan: PeersPlan, name: str, transfer: _Answer | None, log: Path) -> None:
        self.name, self._log = name, log
        command = [str(plan.python), "-m", "quire.bench.peers.vllm_side"]
        try:
            with log.open("wb") as lines:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=lines,
                    text=True,
                )
        except OSError as error:
            raise ConfigError(f"{plan.python} cannot be run: {error.strerror}") from error
        self._tell(
            model=str(plan.model), max_model_len=MAX_MODEL_LEN, at_once=AT_ONCE, transfer=transfer
        )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ready(self) -> None:
        """Wait until its engine is built."""
        self._hear()

    def ask(self, prompts: list[PromptIds], max_tokens: int) -> _Answer:
        self._tell(do="ask", prompts=prompts, max_tokens=max_tokens)
        return self._hear()

    def forget(self) -> None:
        self._tell(do="forget")
        if not self._hear().get("ok", True):
            raise ConfigError(f"{self.name} does not forget what vLLM has cached itself")

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

    def _hear(self) -> _Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace")[-2000:]
            raise ConfigError(
                f"{self.name} ended: does {self._process.args!r} run by hand? It needs vLLM and "
                f"Quire in one environment, as `make test-vllm` makes it. It said: {said}"
            )
        found: _Answer = json.loads(line)
        return found


@dataclass
class Trial:
    """All sides, and what they answered: (what, tokens) → by prompt, by side."""

    servers: list[int] = field(default_factory=list)
    """Processes beside the engines."""
    found: dict[tuple[str, int], list[dict[str, _Answer]]] = field(default_factory=dict)
    max_rss_bytes: dict[str, int] = field(default_factory=dict)
    num_asked: int = 0

    def ask(
        self,
        sides: list[EngineSide],
        what: str,
        tokens: int,
        prompts: list[PromptIds],
        answer: int = 1,
    ) -> None:
        orders = list(permutations(sides))
        order = orders[self.num_asked % len(orders)]
        self.num_asked += 1
        working = [one.process_id for one in sides] + self.servers
        got: dict[str, _Answer] = {}
        for side in order:
            wait_for_rest(working)
            got[side.name] = side.ask(prompts, answer)
        if what:
            self.found.setdefault((what, tokens), []).append(got)
        for name, one in got.items():
            self.max_rss_bytes[name] = max(self.max_rss_bytes.get(name, 0), one["max_rss_bytes"])


def run(plan: PeersPlan, progress: Progress) -> dict[str, Any]:
    chance = random.Random(1)
    trial, kept = Trial(), list[tuple[int, PromptIds]]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-peers-")))
        transfers: dict[str, _Answer | None] = {ALONE: None, QUIRE: _quire(plan, folder)}
        server: LmcacheServer | None = None
        if plan.lmcache:
            server = LmcacheServer(plan.python, plan.host_gib, folder / "lmcache.log")
            stack.enter_context(closing(server))
            server.ready()
            trial.servers.append(server.process_id)
            transfers[LMCACHE] = server.transfer
        total = plan.rounds + 1 + len(plan.sessions)
        with _sides(plan, transfers, folder) as sides:
            for number in range(plan.rounds + 1):
                progress("rounds", number, total)
                prompts = [_prompt(chance, length) for length in plan.lengths]
                _round(trial, sides, prompts, chance, warm_up=number == 0)
                kept += zip(plan.lengths, prompts, strict=True) if number else ()
            for number, session in enumerate(plan.sessions, plan.rounds + 1):
                progress("rounds", number, total)
                _session(trial, sides, session)
                kept.append((_group(len(session[-1])), session[-1]))
        progress("rounds", total, total)
        with _sides(plan, transfers, folder) as sides:
            for tokens, prompt in kept:
                trial.ask(sides, "restart", tokens, [prompt])
        extra_bytes = {LMCACHE: server.max_rss_bytes} if server is not None else {}
    return _result(plan, trial, extra_bytes)


def _quire(plan: PeersPlan, store: Path) -> _Answer:
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
def _sides(
    plan: PeersPlan, transfers: dict[str, _Answer | None], logs: Path
) -> Iterator[list[EngineSide]]:
    sides: list[EngineSide] = []
    try:
        for name, transfer in transfers.items():
            sides.append(EngineSide(plan, name, transfer, logs / f"{name}.log"))
            sides[-1].ready()
        yield sides
    finally:
        for side in sides:
            side.close()


def _prompt(chance: random.Random, length: int) -> PromptIds:
    return [chance.choice(VOCABULARY) for _ in range(length)]


def _round(
    trial: Trial,
    sides: list[EngineSide],
    prompts: list[PromptIds],
    chance: random.Random,
    *,
    warm_up: bool,
) -> None:
    for what in ("new", "again"):
        for prompt in prompts:
            trial.ask(sides, "" if warm_up else what, len(prompt), [prompt])
        for side in sides:
            side.forget()
    batch = [_prompt(chance, BATCH_TOKENS) for _ in range(BATCH)]
    trial.ask(sides, "" if warm_up else "batch", BATCH_TOKENS, batch, BATCH_ANSWER)
    for side in sides:
        side.forget()


def _session(trial: Trial, sides: list[EngineSide], session: list[PromptIds]) -> None:
    trial.ask(sides, "first turn", _group(len(session[0])), [session[0]])
    for before, prompt in pairwise(session):
        for side in sides:
            side.forget()
        trial.ask(sides, "turn", _group(len(before)), [prompt])
    for side in sides:
        side.forget()


def _group(tokens: int) -> int:
    return max(least for least in HIT_TOKENS if least <= tokens)


def _result(plan: PeersPlan, trial: Trial, extra_bytes: dict[str, int]) -> dict[str, Any]:
    """`extra_bytes`: of processes beside the engine's."""
    cases = [_case(what, tokens, found) for (what, tokens), found in trial.found.items()]
    return {
        "rounds": plan.rounds,
        "sessions": len(plan.sessions),
        "load_average": os.getloadavg()[0],
        "cases": cases,
        "max_rss_bytes": {
            side: trial.max_rss_bytes[side] + extra_bytes.get(side, 0) for side in plan.sides
        },
        "same_tokens": all(all(case["same_tokens"].values()) for case in cases),
    }


def _case(what: str, tokens: int, found: list[dict[str, _Answer]]) -> dict[str, Any]:
    """`found`: by prompt, what each side answered."""
    sides = sorted(found[0], key=[ALONE, QUIRE, LMCACHE].index)
    seconds = {side: [one[side]["seconds"] for one in found] for side in sides}
    others = [side for side in sides if side != QUIRE]
    return {
        "what": what,
        "tokens": tokens,
        "samples": seconds,
        "seconds": {side: summary(values) for side, values in seconds.items()},
        "ratio": {side: ratio(seconds[QUIRE], seconds[side])["of_pairs"] for side in others},
        "reused": {side: sum(sum(one[side]["reused"]) for one in found) for side in sides},
        "same_tokens": {
            side: all(one[side]["tokens"] == one[ALONE]["tokens"] for one in found)
            for side in sides
            if side != ALONE
        },
    }
