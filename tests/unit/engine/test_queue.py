"""Who waits: what is known of them all costs nothing, however many they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from quire.engine.admission import Admission
from quire.engine.queue import Queue
from quire.engine.request import Request
from quire.keys import Namespace

NAMESPACE = Namespace("model", "float32", 4)


def queue_of(count: int) -> tuple[Queue, list[Request]]:
    queue = Queue(max_running=4, max_waiting=count, clock=lambda: 0.0)
    requests = []
    for number in range(count):
        tokens = np.zeros(4 * (number % 3 + 1), dtype=np.int32).tobytes()
        request = Request.of_peer(str(number), tokens, NAMESPACE, priority=number % 2, now=0.0)
        request.lease = cast(Any, SimpleNamespace())
        queue.counters.arrived += 1
        queue.add(request)
        requests.append(request)
    return queue, requests


def test_tokens_that_wait_are_counted_as_they_come_and_go() -> None:
    queue, requests = queue_of(12)
    queue.run(requests[3])
    queue.hold(requests[3])
    queue.run(requests[8])
    queue.requeue(requests[8])
    queue.hold(requests[1])
    queue.remove(requests[6])
    assert queue.waiting_tokens == sum(request.length for request in queue.waiting) > 0
    for request in list(queue.requests()):
        queue.remove(request)
    assert queue.waiting_tokens == 0


class Slow:
    """A manager whose prefetches do not end."""

    config = SimpleNamespace(page_size=4)

    def __init__(self, requests: list[Request]) -> None:
        self._names = {id(request.lease): request for request in requests}
        self.asked: list[Request] = []

    def ready(self, lease: object) -> bool:
        self.asked.append(self._names[id(lease)])
        return False


def test_a_step_looks_at_as_many_of_a_thousand_that_wait_as_of_two_hundred() -> None:
    asked = {}
    for count in (200, 1000):
        queue, requests = queue_of(count)
        manager, none = Slow(requests), cast(Any, None)
        holds = cast(Any, SimpleNamespace(num_let_go=0))
        admission = Admission(cast(Any, manager), queue, holds, none, None, reuse=True)
        assert list(admission.admitted()) == []
        asked[count] = len(manager.asked)
        assert manager.asked[:32] == queue.waiting[:32]  # whose turn it is comes first
        for _ in range(count // 32):
            assert list(admission.admitted()) == []
        assert set(manager.asked) == set(requests)  # and everybody has their turn
    assert asked[200] == asked[1000]
