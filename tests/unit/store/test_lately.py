"""What was just done is known for a moment, of so many names."""

from quire.store.base import ObjectName
from quire.store.lately import Lately
from quire.types import PageKey


def name(n):
    return ObjectName(PageKey(bytes([n]) * 32), "full", 0, 1)


def test_names_are_forgotten_after_a_moment(clock):
    lately = Lately(keep_s=10.0, max_names=8, clock=clock)
    lately.add([name(1)])
    clock.now += 6.0
    lately.add([name(2)])
    assert name(1) in lately
    clock.now += 6.0
    assert name(1) not in lately
    assert name(2) in lately
    lately.add([name(2)])
    clock.now += 6.0
    assert name(2) in lately


def test_no_more_than_so_many_are_known(clock):
    lately = Lately(keep_s=10.0, max_names=2, clock=clock)
    for n in (1, 2, 3):
        lately.add([name(n)])
    assert [name(n) in lately for n in (1, 2, 3)] == [False, True, True]
    clock.now += 20.0
    lately.add([name(4)])
    assert list(lately._until) == [name(4)]


def test_names_can_be_taken_back(clock):
    lately = Lately(keep_s=10.0, max_names=8, clock=clock)
    for n in (1, 2, 3):
        lately.add([name(n)])
    lately.discard([name(2)])
    assert [name(n) in lately for n in (1, 2, 3)] == [True, False, True]
    lately.clear()
    assert name(1) not in lately
