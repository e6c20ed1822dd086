"""One server after the other is stopped, or killed, and started again, while 64 people talk to the
router: plainly, with logprobs, and with several answers to one question."""

from __future__ import annotations

import contextlib
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from e2e.disagg.fleet import SUBJECT, Fleet, is_right, prompt
from e2e.disagg.servers import TIMEOUT_S, check_ids, stream
from e2e.exactness.subjects import Prompt

NUM_TOKENS = 40
NUM_PEOPLE = 64
PAUSE_S = 0.2
FAILED_OVER = "quire_router_failovers_total"
KINDS: list[dict[str, Any]] = [
    {"logprobs": None, "return_token_ids": True},
    {"logprobs": 1},
    {"logprobs": None, "return_token_ids": True, "n": 2},
]


class Talk:
    """All of them, from the first question until `end`; each has its own kind of question."""

    def __init__(self, fleet: Fleet, num_people: int) -> None:
        self._over = threading.Event()
        self._prompts = [prompt(150) for _ in range(24)]
        self._pool = ThreadPoolExecutor(num_people)
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.Client(base_url=fleet.router.url, timeout=TIMEOUT_S, limits=limits)
        self._people = [self._pool.submit(self._talk, number) for number in range(num_people)]

    def end(self) -> list[int]:
        """How often each was answered, rightly every time."""
        self._over.set()
        with contextlib.closing(self._http), self._pool:
            people: list[Future[int]] = self._people
            return [each.result() for each in people]

    def _talk(self, number: int) -> int:
        kind = KINDS[number % len(KINDS)]
        num_answers = 0
        while not self._over.wait(PAUSE_S):
            mine = self._prompts[(number + 7 * num_answers) % len(self._prompts)]
            self._ask(mine, kind)
            num_answers += 1
        return num_answers

    def _ask(self, mine: Prompt, kind: dict[str, Any]) -> None:
        reply = stream(self._http, mine, NUM_TOKENS, **kind)
        assert reply.status == 200, reply
        assert not reply.error, reply
        if kind["logprobs"]:
            is_right(mine, reply)
            assert len(reply.names) == NUM_TOKENS
            return
        assert len(reply.by_choice) == kind.get("n", 1)
        for ids in reply.by_choice.values():
            assert len(ids) == NUM_TOKENS
            check_ids(SUBJECT, mine, ids)


@pytest.mark.long
def test_a_rolling_restart_fails_and_repeats_nothing(fleet: Fleet) -> None:
    """No request fails, no token is missing or doubled, no stream begins again elsewhere."""
    lines = [f'{FAILED_OVER}{{outcome="{how}"}}' for how in ("resumed", "failed", "diverged")]
    before = [fleet.metric(line) for line in lines]
    talk = Talk(fleet, NUM_PEOPLE)
    try:
        for node in fleet.nodes:
            node.process.send_signal(signal.SIGTERM)
            assert node.wait() == 0
            fleet.mend()
    finally:
        answers = talk.end()
    assert all(answers)
    assert [fleet.metric(line) for line in lines] == before
    print(f"{sum(answers)} answers to {NUM_PEOPLE} people")


@pytest.mark.long
def test_whoever_is_killed_the_same_tokens_come(fleet: Fleet) -> None:
    """Those that were being told go on elsewhere: none fails, no token is missing or doubled."""
    failed = [f'{FAILED_OVER}{{outcome="{how}"}}' for how in ("failed", "diverged")]
    before = [fleet.metric(line) for line in failed]
    talk = Talk(fleet, NUM_PEOPLE)
    try:
        for node in fleet.nodes:
            node.kill_all()
            node.wait()
            fleet.mend()
    finally:
        answers = talk.end()
    assert all(answers)
    assert [fleet.metric(line) for line in failed] == before
