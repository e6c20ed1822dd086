"""An engine whose requests wait for peers sleeps until it hears of one, or something is due."""

from __future__ import annotations

import numpy as np

from quire.engine.config import Role
from quire.engine.messages import Generate, SamplingParams
from quire.sim.pd.options import SimPdOptions
from quire.sim.pd.run import PdSimulation
from quire.sim.pd.sim_node import SimNode
from quire.types import RequestId, Tier


def asked(sim: PdSimulation, decode: SimNode) -> None:
    tokens = np.array([0, 1, 1, 0] * 8, dtype="<i4").tobytes()
    params = SamplingParams(max_tokens=2, temperature=0.0)
    decode.engine.handle(Generate(RequestId("r"), tokens, params, "", 0, 3600.0, []))
    for _ in range(20):
        sim.happen()
        decode.step()
        sim.clock.advance(0.02)


def test_decode_does_not_spin_while_prefill_computes() -> None:
    sim = PdSimulation(1, SimPdOptions())
    (decode,) = [node for node in sim.nodes if node.place.role is Role.DECODE]
    asked(sim, decode)
    assert decode.exchange.receiver.open
    assert decode.engine.patience_s() >= 0.05
    sim.clock.advance(10.0)  # its patience with the peer is over: that is looked at
    assert decode.engine.patience_s() <= 0.001


def test_prefill_does_not_spin_while_decode_is_to_take_what_it_has() -> None:
    sim = PdSimulation(1, SimPdOptions(timeout_s=60.0))
    (decode,) = [node for node in sim.nodes if node.place.role is Role.DECODE]
    (prefill,) = [node for node in sim.nodes if node.place.role is Role.PREFILL]
    asked(sim, decode)
    for _ in range(200):
        sim.happen()
        prefill.step()
        sim.clock.advance(0.02)
    assert prefill.exchange.giver.open
    assert prefill.scheduler.holding
    assert prefill.engine.patience_s() >= 0.05


def test_prefill_lets_go_of_the_device_once_the_host_has_it() -> None:
    """Decode has taken nothing yet, and may be slow to: others need the device."""
    sim = PdSimulation(1, SimPdOptions(timeout_s=60.0))
    (decode,) = [node for node in sim.nodes if node.place.role is Role.DECODE]
    (prefill,) = [node for node in sim.nodes if node.place.role is Role.PREFILL]
    asked(sim, decode)
    for _ in range(200):
        sim.happen()
        prefill.step()
        sim.clock.advance(0.02)
    assert prefill.exchange.giver.open
    locked = {(p.component, p.tier): p.locked_pages for p in prefill.manager.pools()}
    assert locked["full", Tier.DEVICE] == 0
    assert locked["full", Tier.HOST] > 0
