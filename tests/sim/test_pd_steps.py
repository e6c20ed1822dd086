"""What a step of an engine costs while many hand-overs wait. Counted in calls of functions, which
depend on no other process; the time is printed: `pytest -s tests/sim/test_pd_steps.py`."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from quire.engine.config import Role
from quire.engine.messages import Generate, SamplingParams
from quire.sim.pd.options import SimPdOptions
from quire.sim.pd.run import PdSimulation
from quire.sim.pd.sim_node import SimNode
from quire.types import RequestId
from support import calls_of

NUM_QUEUED = 1000
NUM_PAGES = 2
NUM_STEPS = 50
MOST_CALLS = 2000
"""More, in a step with NUM_QUEUED: some tenths of a millisecond."""


@pytest.mark.parametrize("side", [Role.DECODE, Role.PREFILL])
def test_a_step_with_a_thousand_hand_overs_queued_costs_little_more_than_with_none(
    side: Role,
) -> None:
    """At decode they wait for room on its host; at prefill, where many decode servers ask, for
    that of the prefill server."""
    cluster = Cluster(many=Role.DECODE if side is Role.PREFILL else Role.PREFILL)
    cluster.ask(8)
    cluster.settle()
    few, few_s = cluster.cost(side)
    cluster.ask(NUM_QUEUED)
    cluster.settle()
    queued = cluster.num_queued(side)
    many, many_s = cluster.cost(side)
    print(
        f"\n{side.value}: {queued:,} queued: {few:,.0f} → {many:,.0f} calls a step, "
        f"{1e3 * few_s:.3f} → {1e3 * many_s:.3f} ms (load average {os.getloadavg()[0]:.1f})"
    )
    assert queued >= 0.9 * NUM_QUEUED
    assert many - few <= MOST_CALLS


class Cluster:
    """One engine of the one side and several of the other; lines that carry next to nothing."""

    def __init__(self, many: Role) -> None:
        options = SimPdOptions(
            prefills=1,
            decodes=22 if many is Role.DECODE else 1,
            device_pages=100,
            host_pages=100,
            link_pages_s=0.01,
            timeout_s=3600.0,
            max_waiting=2 * NUM_QUEUED,
            restore=False,
        )
        self.sim = PdSimulation(1, options)
        self._num_asked = 0

    def ask(self, count: int) -> None:
        takers = self.sim.takers()
        params = SamplingParams(max_tokens=2, temperature=0.0)
        rng = np.random.default_rng(self._num_asked)
        for _ in range(count):
            self._num_asked += 1
            tokens = rng.integers(0, 3, NUM_PAGES * 4 + 1, dtype=np.int32).tobytes()
            taker = takers[self._num_asked % len(takers)]
            name = RequestId(f"r{self._num_asked}")
            taker.engine.handle(Generate(name, tokens, params, "", 0, 3600.0, []))

    def settle(self) -> None:
        for _ in range(12):
            self.sim.clock.advance(0.02)
            self.sim.happen()
            for node in self.sim.nodes:
                node.step()

    def cost(self, side: Role) -> tuple[float, float]:
        """Calls and seconds of a step."""
        node = self._one(side)
        calls = calls_of(lambda: [self._step(node) for _ in range(NUM_STEPS)])
        began_s = time.perf_counter()
        for _ in range(NUM_STEPS):
            self._step(node)
        return calls / NUM_STEPS, (time.perf_counter() - began_s) / NUM_STEPS

    def num_queued(self, side: Role) -> int:
        exchange = self._one(side).exchange
        return exchange.receiver.num_waiting + len(exchange.giver.open)

    def _one(self, side: Role) -> SimNode:
        return next(node for node in self.sim.nodes if node.place.role is side)

    def _step(self, node: SimNode) -> None:
        self.sim.clock.advance(0.001)
        node.engine.step()
        node.engine.take_messages()
