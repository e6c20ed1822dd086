"""Grants: read while they are open, free when the last reader has left, told apart by life."""

import threading

from quire.peer.grants import Grants
from quire.types import NO_PAGES, page_ids
from unit.peer.rig import WAIT_S


class Free:
    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1


def test_revoking_what_nobody_reads_or_knows_frees_at_once():
    grants, free = Grants(), Free()
    assert grants.add(1, "full", page_ids([3]))
    grants.revoke(1, "full", free)
    grants.revoke(2, "full", free)
    assert free.count == 2
    assert len(grants) == 0


def test_pages_are_free_when_the_last_reader_has_left_and_only_once():
    grants, free = Grants(), Free()
    grants.add(1, "full", page_ids([3]))
    first, second = grants.enter(1, "full", 0.0), grants.enter(1, "full", 0.0)
    grants.revoke(1, "full", free)
    assert grants.enter(1, "full", WAIT_S) is None  # revoked: not worth waiting for
    grants.leave(first)
    assert free.count == 0
    grants.leave(second)
    assert free.count == 1


def test_a_second_grant_of_the_same_name_changes_nothing():
    grants = Grants()
    assert grants.add(1, "full", page_ids([3]))
    assert not grants.add(1, "full", page_ids([4]))
    assert grants.add(1, "window", NO_PAGES)
    assert grants.enter(1, "full", 0.0).pages.tolist() == [3]


def test_a_reader_who_is_early_waits_for_the_grant():
    grants = Grants()
    threading.Timer(0.05, grants.add, (5, "full", page_ids([1]))).start()
    assert grants.enter(5, "full", WAIT_S) is not None
    assert grants.enter(6, "full", 0.0) is None
    assert grants.enter(6, "full", float("nan")) is None


def test_closing_sends_those_who_wait_away():
    grants = Grants()
    threading.Timer(0.05, grants.close).start()
    assert grants.enter(5, "full", WAIT_S) is None
    assert not grants.add(5, "full", page_ids([1]))
