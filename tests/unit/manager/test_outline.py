"""The tree as a person may look at it: where runs of pages begin and end, and whose they are."""

from __future__ import annotations

from quire.keys import PrefixKey
from quire.types import Tier
from support import PAGE, Rig, namespace, tokens_for


def test_a_fork_is_three_runs_and_each_says_where_it_is() -> None:
    rig = Rig(device=40, host=40, store=False)
    base = tokens_for(4, seed=1)
    for seed in (2, 3):
        rig.cache(rig.key(base + tokens_for(2, seed=seed)))
    shared, *ends = rig.manager.outline(10)
    assert (shared.parent, shared.first, shared.last) == (-1, 0, 4)
    assert [(end.parent, end.first, end.last) for end in ends] == [(0, 4, 6)] * 2
    assert {(run.device, run.host, run.store) for run in (shared, *ends)} == {(True, True, False)}
    assert shared.age <= min(end.age for end in ends)
    rig.manager.flush(Tier.DEVICE)
    assert not any(run.device for run in rig.manager.outline(10))


def test_it_says_whose_they_are() -> None:
    rig = Rig(device=40, host=40, store=False)
    rig.cache(rig.doc(3, seed=1))
    rig.cache(PrefixKey(namespace(salt="alice"), tokens_for(2, seed=1)))
    assert [(run.tenant, run.last) for run in rig.manager.outline(10)] == [("", 3), ("alice", 2)]


def test_what_is_near_the_root_comes_first_when_there_is_more_than_asked_for() -> None:
    rig = Rig(device=60, host=0, store=False)
    for seed in range(5):
        rig.cache(rig.key(tokens_for(1, seed=seed)))
    long = tokens_for(1, seed=0)
    for seed in (7, 8):
        rig.cache(rig.key(long + tokens_for(1, seed=seed)))
    assert len(long) == PAGE
    assert [run.parent for run in rig.manager.outline(5)] == [-1] * 5
