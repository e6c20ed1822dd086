"""Nobody starves: the engine's own queue under random floods, by seed. Tenants of many requests and
high priorities, also by ever new salts of one key, and one who asks now and then, at no priority.

What a user would notice is how many others are served between asking and being served.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from quire.engine import queue as rooms
from quire.engine.queue import Queue
from quire.engine.request import Request
from quire.keys import Namespace
from quire.types import TENANT_MARK, tenant_of

NAMESPACE = Namespace("model", "float32", 4)
TOP = 2
"""The highest priority that anybody asks for."""


class Server:
    """Serves one request at a time, and remembers how many others each let pass."""

    def __init__(self) -> None:
        self.queue = Queue(max_running=1, max_waiting=100_000, clock=lambda: 0.0)
        self.served: list[Request] = []
        self.began: dict[str, int] = {}

    def ask(self, salt: str, priority: int) -> str:
        name = str(self.queue.counters.arrived)
        tokens = np.zeros(4, dtype=np.int32).tobytes()
        request = Request.of_peer(name, tokens, NAMESPACE, priority=priority, now=0.0)
        request.salt = salt
        self.queue.counters.arrived += 1
        self.queue.add(request)
        self.began[name] = len(self.served)
        return name

    def serve(self) -> Request:
        request = self.queue.waiting[0]
        self.queue.run(request)
        self.queue.remove(request)
        self.served.append(request)
        return request


def longest_wait(seed: int) -> tuple[int, int]:
    """Of the modest one's requests; and how many tenants there were."""
    rng, server = Random(seed), Server()
    floods = [f"t{i}" for i in range(rng.randrange(1, 5))]
    floods.append(f"keyed{TENANT_MARK}")  # and a salt of its own for each request
    waits, asked = [], None
    for step in range(1500):
        for salt in floods:
            for number in range(rng.randrange(3)):
                own = f"{salt}{step}.{number}" if salt.endswith(TENANT_MARK) else salt
                server.ask(own, rng.choice((0, TOP)))
        if asked is None and rng.random() < 0.05:
            asked = server.ask("modest", 0)
        if server.queue.waiting and server.serve().id == asked:
            waits.append(len(server.served) - server.began[asked] - 1)
            asked = None
    assert asked is None or len(server.served) - server.began[asked] < 1000
    assert len(waits) > 5, "it asked and was served"
    return max(waits), len({tenant_of(request.salt) for request in server.served}) - 1


@pytest.mark.parametrize("seed", range(5))
def test_who_asks_for_little_waits_for_some_of_each_and_no_more(seed: int) -> None:
    wait, tenants = longest_wait(seed)
    assert wait <= tenants * (2 * 16 * TOP + 2)


def test_a_queue_without_turns_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By priority alone, and by salt instead of tenant: the check can fail."""
    monkeypatch.setattr(rooms, "_TURNS_PER_PRIORITY", 10_000)
    with pytest.raises(AssertionError):
        test_who_asks_for_little_waits_for_some_of_each_and_no_more(0)
    monkeypatch.undo()
    monkeypatch.setattr(rooms, "tenant_of", lambda salt: salt)
    with pytest.raises(AssertionError):
        test_who_asks_for_little_waits_for_some_of_each_and_no_more(0)
