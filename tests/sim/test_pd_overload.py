"""More is offered than the lines between engines carry: they stay full, and all of it clears.

A longer run by hand: `quire sim pd --link-pages-s 4 --arrivals 0.06 --steps 20000`.
"""

from __future__ import annotations

import pytest

from quire.sim.pd.options import SimPdOptions
from quire.sim.pd.run import PdSimulation

PAGES_S = 4.0


@pytest.mark.parametrize("seed", [3, 5])
def test_lines_that_are_offered_too_much_stay_full_and_nothing_is_starved(seed: int) -> None:
    """Without end to what they carry the engines would exchange more. Pages that have come count,
    not those that were sent twice; and a call that is kept waiting for ever breaks a rule."""
    options = SimPdOptions(
        prefills=2,
        decodes=2,
        device_pages=60,
        host_pages=80,
        link_pages_s=PAGES_S,
        arrivals=0.06,
        restore=False,
    )
    sim = PdSimulation(seed, options)
    for _ in range(1000):
        sim.step()
    began_s, before = sim.clock(), received(sim)
    for _ in range(2000):
        sim.step()
    rate = (received(sim) - before) / (sim.clock() - began_s)
    assert rate >= 0.6 * options.decodes * PAGES_S
    sim.drain()
    assert not sim.clients.calls
    counters = sim.report(seed, 3000).counters
    given_up = sum(counters.get(f"repair {why}", 0) for why in ("silent", "room", "timeout"))
    assert given_up <= 0.1 * counters["received_pages"]


def received(sim: PdSimulation) -> int:
    return sum(node.manager.counters.received_pages for node in sim.nodes)
