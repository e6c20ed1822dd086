"""A conversation leaves the same tree however it was committed: page by page as it is decoded,
chunk by chunk as a prompt is computed, or at once (C39); and only what it is said to be."""

from __future__ import annotations

import gc

import pytest

from quire.config import WriteConfig, WritePolicy
from quire.errors import LeaseError
from quire.manager import Lease, Wish
from quire.tree import Node
from quire.types import Tier
from support import PAGE, Rig, tokens_for


def nodes(rig: Rig) -> list[tuple[int, int]]:
    """First and last page of every node, the root's apart."""
    found: list[tuple[int, int]] = []
    stack: list[Node] = list(rig.manager._core.tree.roots.values())
    while stack:
        node = stack.pop()
        stack += (node.children or {}).values()
        found += [(node.start, node.end)] if node.parent is not None else []
    return sorted(found)


def num_objects(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


def commit_in_pieces(rig: Rig, lease: Lease, pages: int, piece: int, *, step: bool) -> None:
    key = lease.key
    assert rig.manager.extend(lease, pages - lease.num_device)
    for end in range(lease.num_device + piece, pages + piece, piece):
        rig.manager.commit(lease, key[: min(end, pages)])
        if step:
            rig.run()


@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("piece", [1, 5])
def test_pieces_leave_the_tree_that_a_whole_leaves_c39(
    policy: WritePolicy, store: bool, step: bool, piece: int
) -> None:
    rig = Rig(device=128, host=128, store=store, write=WriteConfig(policy=policy))
    key = rig.doc(60, seed=1)
    lease = rig.acquire(key)
    commit_in_pieces(rig, lease, 60, piece, step=step)
    rig.manager.release(lease)
    rig.run()
    assert rig.matched(key) == (60, 0)
    assert len(nodes(rig)) <= 3  # and not one for each commit
    if store and policy is WritePolicy.WRITE_THROUGH:
        assert rig.in_store(key)
        rig.manager.flush(Tier.DEVICE)
        assert rig.matched(key) == (0, 60)


@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("wish", [None, Wish(retain_s=60.0, level=1)])
def test_so_do_windows_also_of_what_is_to_be_kept_c39(
    wish: Wish | None, policy: WritePolicy
) -> None:
    """A page had its window when its copy came to rest, and nobody looked at it when that went: a
    talk left a node for each page."""
    rig = Rig(mix="full+window", device=240, host=240, write=WriteConfig(policy=policy))
    key = rig.doc(100, seed=1)
    lease = rig.acquire(key, wish=wish)
    for end in range(1, 101):
        assert rig.manager.extend(lease, 1)
        assert rig.manager.cover(lease, end)
        rig.manager.commit(lease, key[:end])
        rig.run()
    rig.manager.release(lease)
    rig.run()
    assert rig.matched(key) == (100, 0)
    assert len(nodes(rig)) <= 8


def test_turns_of_a_conversation_do_not_pile_up_nodes_c39() -> None:
    rig = Rig(device=256, host=256)
    talk = tokens_for(100, seed=1)
    for turn in range(1, 21):
        rig.cache(rig.key(talk[: turn * 5 * PAGE]))
        assert len(nodes(rig)) <= 4
    assert rig.matched(rig.key(talk)) == (100, 0)


def test_what_talks_leave_behind_waits_for_no_collection() -> None:
    """Nodes that became one with others are freed at once, with their tokens."""
    rig = Rig(device=64, host=64, store=False)
    gc.collect()
    gc.disable()
    before = num_objects(Node)
    try:
        talk = tokens_for(50, seed=1)
        for turn in range(1, 11):
            rig.cache(rig.key(talk[: turn * 5 * PAGE]))
        rig.manager.flush(Tier.DEVICE)
        assert num_objects(Node) - before == len(nodes(rig)) < 10
    finally:
        gc.enable()


def test_what_is_committed_below_a_shared_node_does_not_change_it_c39() -> None:
    """Two requests go on from one prompt: neither grows the node that both stand on."""
    rig = Rig(device=64, host=0, store=False)
    base = tokens_for(3, seed=1)
    talks = [rig.key(base + tokens_for(3, seed=seed)) for seed in (2, 3)]
    rig.cache(rig.key(base))
    leases = [rig.acquire(talk) for talk in talks]
    for lease in leases:
        commit_in_pieces(rig, lease, 6, 1, step=False)
    for talk, lease in zip(talks, leases, strict=True):
        assert rig.matched(talk) == (6, 0)
        rig.manager.release(lease)
    assert nodes(rig) == [(0, 3), (3, 6), (3, 6)]


@pytest.mark.parametrize("piece", [1, 3])
def test_a_request_that_stops_in_the_middle_of_a_node_that_grows_c39(piece: int) -> None:
    rig = Rig(device=64, host=64)
    key = rig.doc(12, seed=1)
    growing = rig.acquire(key)
    assert rig.manager.extend(growing, 12)
    rig.manager.commit(growing, key[:6])
    half = rig.acquire(key[:4])
    for end in range(6, 13, piece):
        rig.manager.commit(growing, key[:end])
        rig.run()
    assert half.num_device == 4
    assert half.pages == growing.pages[:16]
    rig.manager.release(half)
    rig.manager.release(growing)
    rig.run()
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(key) == (0, 12)


def test_events_name_each_page_once_however_it_was_committed_c39() -> None:
    rig = Rig(device=64, host=0, store=False, event_buffer=1000)
    lease = rig.acquire(rig.doc(8, seed=1))
    commit_in_pieces(rig, lease, 8, 1, step=False)
    keys = b"".join(event.keys for event in rig.manager.events.take().events)
    assert keys == lease.key.page_keys()
    rig.manager.release(lease)


def test_a_commit_that_does_not_extend_what_the_lease_stands_on_is_refused() -> None:
    rig = Rig(store=False)
    lease = rig.compute(rig.doc(3, seed=1))
    assert rig.manager.extend(lease, 2)
    with pytest.raises(LeaseError, match="another prefix"):
        rig.manager.commit(lease, rig.doc(5, seed=2))
    assert rig.matched(rig.doc(5, seed=2)) == (0, 0)
    rig.manager.release(lease)
