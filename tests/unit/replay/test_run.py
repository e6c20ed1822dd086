"""A replay is the real cache: what it finds is what requests would find."""

from dataclasses import replace

import pytest

from quire.config import WritePolicy
from quire.replay.bounds import IdealLru, hits_of
from quire.replay.occupancy import Occupancy
from quire.replay.run import Replayed, ReplayOptions, replay
from quire.replay.synthetic import Chats, chats
from quire.replay.trace import TraceHeading, TraceLine, trace_of

POLICIES = list(WritePolicy)
ROOMY = ReplayOptions(device_pages=100, host_pages=100)


def trace(*prompts: list[int], answers: dict[int, list[int]] | None = None):
    lines = [
        TraceLine(1000.0 * i, 512 * len(ids), 0, ids, (answers or {}).get(i, []))
        for i, ids in enumerate(prompts)
    ]
    return trace_of("test", lines, TraceHeading(1, 512))


def found(requests, options: ReplayOptions) -> list[Replayed]:
    return replay(requests, options).found


def test_what_was_asked_before_is_found_on_the_device():
    assert found(trace([1, 2, 3], [1, 2, 3, 4], [9], [1, 2]), ROOMY) == [
        Replayed(0, 0, 0),
        Replayed(3, 0, 0),
        Replayed(0, 0, 0),
        Replayed(2, 0, 0),
    ]


def test_what_an_answer_added_is_found_by_the_next_turn():
    turns = trace([1, 2], [1, 2, 7, 8], answers={0: [7]})
    assert found(turns, ROOMY)[1] == Replayed(3, 0, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_device_could_not_hold_is_found_on_the_host_and_then_in_the_store(policy):
    prompts = [[10 * i + j for j in range(6)] for i in range(5)]
    options = ReplayOptions(device_pages=8, host_pages=12, store_pages=100, write_policy=policy)
    by_tier = [0, 0, 0]
    for each in found(trace(*prompts, *prompts[::-1]), options)[5:]:
        by_tier[0] += each.device
        by_tier[1] += each.host
        by_tier[2] += each.store
    assert by_tier[0] >= 6
    if policy is WritePolicy.WRITE_THROUGH:
        assert by_tier[1] > 0
        assert by_tier[2] > 0
        assert sum(by_tier) == 30


def test_a_store_keeps_within_its_budget_the_beginnings_of_prompts():
    prompts = [[10 * i + j for j in range(6)] for i in range(5)]
    options = ReplayOptions(device_pages=8, host_pages=7, store_pages=9)
    last = found(trace(*prompts, *prompts), options)[5:]
    assert sum(each.num_pages for each in last) <= 8 + 7 + 9


def test_a_hit_nearly_as_large_as_the_host_is_found_whole():
    long, others = [*range(60)], [[100 + 20 * i + j for j in range(20)] for i in range(10)]
    options = ReplayOptions(device_pages=80, host_pages=64, store_pages=1000)
    assert found(trace(long, *others, long), options)[-1] == Replayed(0, 0, 60)


def test_requests_that_do_not_fit_beside_what_is_in_use_are_counted():
    options = ReplayOptions(device_pages=20, host_pages=100, occupancy=Occupancy(0.8))
    outcome = replay(trace([1, 2], [*range(10, 18)], [1, 2]), options)
    assert outcome.num_cut == 1
    assert outcome.found[2].num_pages == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "occupancy",
    [Occupancy(), Occupancy(0.3), Occupancy(0.7), Occupancy(0.3, 0.7)],
    ids=["free", "in_use", "tight", "burst"],
)
def test_it_finds_no_more_than_there_is_room_for_and_much_of_that(policy, occupancy):
    """How near it comes to an ideal LRU is for a real trace to say: docs/capacity.md."""
    requests = chats(Chats(groups=5, requests=600, active=40, system_blocks=4))
    options = ReplayOptions(
        device_pages=200, host_pages=300, occupancy=occupancy, write_policy=policy
    )
    hits = sum(each.num_pages for each in found(requests, options))
    everything = requests.num_asked - requests.num_distinct
    assert 0.5 * hits_of(IdealLru(), requests, options.room) < hits <= everything


def test_the_same_trace_and_sizes_find_the_same():
    requests = chats(Chats(groups=5, requests=300, active=40))
    options = replace(ROOMY, device_pages=80, occupancy=Occupancy(0.2, 0.5))
    assert replay(requests, options) == replay(requests, options)


def test_progress_is_told_to_the_end():
    told: list[int] = []
    replay(trace([1], [2]), ROOMY, told.append)
    assert told[-1] == 2
