"""The bounds that a cache is measured by: themselves compared with the naive."""

import itertools
from dataclasses import replace
from random import Random

import pytest

from quire.replay.bounds import Belady, IdealLru, RoomAt, hits_of
from quire.replay.occupancy import Occupancy
from quire.replay.run import ReplayOptions
from quire.replay.synthetic import Chats, chats
from quire.replay.trace import Trace, TraceHeading, TraceLine, trace_of


def trace(*prompts: list[int]) -> Trace:
    lines = [TraceLine(1000.0 * i, 512 * len(ids), 0, ids) for i, ids in enumerate(prompts)]
    return trace_of("test", lines, TraceHeading(1, 512))


def always(num_pages: int) -> RoomAt:
    return lambda _: num_pages


def small(seed: int) -> Trace:
    chance = Random(seed)
    return trace(*([chance.choice([1, 2]), chance.choice([3, 4, 5])] for _ in range(7)))


def test_what_was_used_longest_ago_goes_first_and_the_end_of_a_prompt_before_its_beginning():
    found = trace([1, 2, 3], [1, 2, 3], [4], [1, 2, 3])
    assert hits_of(IdealLru(), found, always(3)) == 3 + 2
    assert hits_of(IdealLru(), found, always(4)) == 3 + 3
    assert hits_of(IdealLru(), found, always(1)) == 1 + 0


def test_a_page_without_those_before_it_helps_nobody():
    lru = IdealLru()
    lru.resize(10)
    lru.use(0, [1, 2, 3], [])
    assert lru.use(1, [1, 9, 3], []) == 1


def test_answers_are_held_though_nobody_asked_for_them():
    for bound in (IdealLru(), Belady(answered := _answered())):
        assert hits_of(bound, answered, always(4)) == 2


def _answered() -> Trace:
    return trace_of(
        "t", [TraceLine(0, 512, 512, [1], [2]), TraceLine(1, 1024, 0, [1, 2])], TraceHeading(1, 512)
    )


@pytest.mark.parametrize("seed", range(8))
def test_knowing_the_future_is_never_beaten(seed):
    """By any choice of what to keep, for small traces: all of them are tried."""
    found = small(seed)
    for size in (1, 2, 3):
        assert hits_of(Belady(found), found, always(size)) == _best(found, size)


def _best(found: Trace, size: int) -> int:
    """By trying every subset of at most `size` pages after every request."""
    states = {frozenset[int](): 0}
    for row in found.rows:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            leading = sum(1 for _ in itertools.takewhile(held.__contains__, row.pages))
            pages = held | set(row.pages)
            for kept in itertools.combinations(sorted(pages), min(size, len(pages))):
                state = frozenset(kept)
                after[state] = max(after.get(state, 0), hits + leading)
        states = after
    return max(states.values())


def test_more_room_never_finds_less_and_the_future_never_less_than_the_past():
    found = chats(Chats(groups=4, requests=400, active=30))
    before = (0, 0)
    for size in (20, 50, 100, 200, 400, found.num_distinct):
        here = tuple(hits_of(bound, found, always(size)) for bound in (IdealLru(), Belady(found)))
        assert here[0] >= before[0]
        assert here[1] >= before[1]
        assert here[1] >= here[0]
        before = here
    assert before[0] == before[1] == found.num_asked - found.num_distinct


def test_what_is_in_use_holds_nothing_and_a_burst_ends():
    found = trace(*[[i % 4] for i in range(40)])
    room = ReplayOptions(device_pages=4, host_pages=0)
    assert hits_of(IdealLru(), found, room.room) == 36
    in_use = ReplayOptions(device_pages=8, host_pages=0, occupancy=Occupancy(0.5))
    assert hits_of(IdealLru(), found, in_use.room) == 36
    burst = replace(room, occupancy=Occupancy(0.0, 0.97, begins=0.5, ends=0.6))
    assert 36 - 4 - 8 <= hits_of(IdealLru(), found, burst.room) < 36


def test_what_the_device_cannot_hold_for_a_request_no_bound_finds_or_keeps():
    found = trace([1, 2, 3, 4], [1, 2, 3, 4], [1])
    options = ReplayOptions(device_pages=10, host_pages=90, occupancy=Occupancy(0.7))
    fitting = options.fitting(found)
    assert [row.pages for row in fitting.rows] == [row.pages[:3] for row in found.rows]
    for bound in (IdealLru(), Belady(fitting)):
        assert hits_of(bound, fitting, options.room) == 3 + 1
    roomy = ReplayOptions(device_pages=10, host_pages=90)
    assert roomy.fitting(found) == found


def test_a_store_holds_again_what_is_above_it():
    sizes = ReplayOptions(device_pages=10, host_pages=20, store_pages=25, occupancy=Occupancy(0.5))
    assert sizes.room(0.0) == 25
    assert replace(sizes, store_pages=40).room(0.0) == 40
    assert replace(sizes, store_pages=0).room(0.0) == 25
