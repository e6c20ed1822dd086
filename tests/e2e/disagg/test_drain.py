"""One server after the other is stopped and started again, while people talk to the router."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from e2e.disagg.fleet import Fleet, is_right, prompt
from e2e.disagg.servers import Reply, stream

NUM_TOKENS = 40
NUM_PEOPLE = 3
PAUSE_S = 0.2
FAILED_OVER = "quire_router_failovers_total"


@pytest.mark.long
def test_a_rolling_restart_fails_and_repeats_nothing(fleet: Fleet) -> None:
    """No request fails, no token is missing or doubled, no stream begins again elsewhere."""
    over = threading.Event()
    lines = [f'{FAILED_OVER}{{outcome="{how}"}}' for how in ("resumed", "failed", "diverged")]
    before = [fleet.metric(line) for line in lines]

    prompts = [prompt(150) for _ in range(8 * NUM_PEOPLE)]

    def talk(number: int) -> int:
        num_answers = 0
        while not over.wait(PAUSE_S):
            mine = prompts[(number + NUM_PEOPLE * num_answers) % len(prompts)]
            reply: Reply = stream(fleet.http, mine, NUM_TOKENS)
            is_right(mine, reply)
            assert len(reply.names) == NUM_TOKENS
            num_answers += 1
        return num_answers

    with ThreadPoolExecutor(NUM_PEOPLE) as pool:
        talking: list[Future[int]] = [pool.submit(talk, number) for number in range(NUM_PEOPLE)]
        try:
            for node in fleet.nodes:
                node.process.send_signal(signal.SIGTERM)
                assert node.wait() == 0
                fleet.mend()
        finally:
            over.set()
        assert all(each.result() > 0 for each in talking)
    assert [fleet.metric(line) for line in lines] == before
