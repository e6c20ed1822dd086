"""The fault loop: for n = 1, 2, 3, …, the n-th backend call fails, until n is beyond the last call.

Whatever fails, all requests finish with the right bytes, and nothing is left over.
"""

from __future__ import annotations

import pytest

from quire.keys import UnitKind
from quire.manager.operations import OperationKind
from quire.messages import Backup, Fetch, Load, Probe, Write
from quire.sim import ComponentMix
from quire.sim.faults import FAULTS_OF
from quire.types import Tier
from sim.harness import BOTH, FULL, RECURRENT, WINDOW, Rig, with_each_mix
from sim.scripted_faults import NthCallFails

SYSTEM = list(range(8))
FIRST = [*SYSTEM, 20, 21, 22, 23, 24]
SECOND = [*SYSTEM, 30, 31, 32, 33, 34]
MAX_CALLS = 1_000


def through_all_tiers(rig: Rig) -> None:
    """Compute, share, load from the host, fetch from the store, branch, change the store."""
    rig.attach()
    rig.serve(FIRST)
    rig.serve(SECOND)  # shares the system prompt on the device, branches after it
    rig.flush(Tier.DEVICE)
    rig.serve(FIRST)  # from the host
    rig.flush(Tier.DEVICE, Tier.HOST)
    rig.serve(SECOND)  # from the store
    rig.serve([*FIRST, 40, 41, 42])  # partly from the store, partly new
    rig.flush(Tier.DEVICE)
    abandon(rig, FIRST)
    if rig.manager.store.url:
        rig.manager.store.clear()
    rig.settle()
    rig.serve(FIRST)
    rig.manager.store.detach()
    rig.settle()
    rig.serve(SECOND)
    rig.finish()


def abandon(rig: Rig, tokens: list[int]) -> None:
    """A request that goes away while its pages are still on their way."""
    lease = rig.acquire(tokens)
    rig.manager.prefetch(lease)
    rig.step()
    rig.manager.admit(lease)
    rig.manager.load(lease)
    rig.step()
    rig.manager.release(lease)


@pytest.mark.parametrize(
    ("mix", "unit", "ranks"),
    [
        (FULL, UnitKind.TOKEN, 1),
        pytest.param(FULL, UnitKind.PAIR, 2, marks=pytest.mark.long),
        (WINDOW, UnitKind.TOKEN, 1),
        pytest.param(RECURRENT, UnitKind.PAIR, 2, marks=pytest.mark.long),
        (BOTH, UnitKind.TOKEN, 1),
    ],
)
def test_every_backend_call_may_fail_once_c17(
    mix: ComponentMix, unit: UnitKind, ranks: int
) -> None:
    """In every way in which calls of its kind may fail."""

    def run(n: int, variant: int) -> OperationKind | None:
        faults = NthCallFails(n, variant)
        through_all_tiers(
            Rig(mix=mix, ranks=ranks, unit=unit, device_pages=14, faults=faults, seed=n)
        )
        return faults.hit

    hit: set[OperationKind] = set()
    for n in range(1, MAX_CALLS):
        kind = run(n, 0)
        if kind is None:
            break
        hit.add(kind)
        for variant in range(1, len(FAULTS_OF[kind])):
            assert run(n, variant) is kind
    else:
        pytest.fail(f"the scenario makes more than {MAX_CALLS} backend calls")
    assert hit == set(OperationKind) - {
        OperationKind.SERVE
    }  # no other engine reads here: see test_pd.py


@with_each_mix
def test_the_scenario_goes_through_all_tiers(mix: ComponentMix) -> None:
    """Or the loop above would prove little."""
    rig = Rig(mix=mix, device_pages=14)
    through_all_tiers(rig)
    counters = rig.manager.counters.snapshot()
    for name in ("backed_up_pages", "loaded_pages", "written_pages", "fetched_pages"):
        assert counters[name] > 0  # type: ignore[index]
    for component in rig.manager.components:
        sent = {type(c) for c in rig.sent if getattr(c, "component", "") == component.name}
        assert sent == {Backup, Load, Write, Fetch, Probe}


@with_each_mix
@pytest.mark.parametrize("n", range(1, 40, 3))
def test_from_the_nth_call_on_everything_fails_c17(n: int, mix: ComponentMix) -> None:
    """A backend that dies and stays dead."""

    class AllFromNth(NthCallFails):
        def on_call(self, kind: OperationKind, rank: int):  # type: ignore[no-untyped-def]
            super().on_call(kind, rank)
            return FAULTS_OF[kind][0] if self.num_calls >= n else None

    through_all_tiers(Rig(mix=mix, device_pages=14, faults=AllFromNth(n), seed=n))
