"""The cost model: measured rates decide, a slow beginning does not."""

import pytest

from quire.manager.costs import CostModel, Way

PAGE = 16


def model(*, fetch_s_per_page: float, prefill_s_per_token: float) -> CostModel:
    costs = CostModel(enabled=True, page_size=PAGE)
    costs.observe_fetch(100, 100 * fetch_s_per_page)
    costs.observe_prefill(1000, 1000 * prefill_s_per_token)
    return costs


def test_fetching_is_worth_it_when_it_is_faster() -> None:
    assert model(fetch_s_per_page=0.001, prefill_s_per_token=0.001).worth_fetching(10)
    assert not model(fetch_s_per_page=0.1, prefill_s_per_token=0.001).worth_fetching(10)


def test_pages_that_lie_in_a_slower_store_are_reckoned_as_such() -> None:
    costs = model(fetch_s_per_page=0.01, prefill_s_per_token=0.001)  # computed: 0.016 a page
    assert costs.choose(10, can_meet=False, pace=1.0) is Way.FETCH
    assert costs.choose(10, can_meet=False, pace=3.0) is Way.COMPUTE
    slow = costs.times(10, 4, 3.0)
    assert slow is not None
    assert slow.fetch_s == pytest.approx(10 * 0.03 + 4 * 0.01)  # those ahead are as they are


def test_without_figures_it_is_tried() -> None:
    assert CostModel(enabled=True, page_size=PAGE).worth_fetching(10)


def test_a_slow_first_prompt_does_not_make_computing_look_slow_for_long() -> None:
    costs = CostModel(enabled=True, page_size=PAGE)
    costs.observe_fetch(100, 100 * 0.01)
    costs.observe_prefill(1000, 1000 * 1.0)  # kernels were loaded
    assert costs.worth_fetching(10)
    for _ in range(2):
        costs.observe_prefill(1000, 1000 * 0.0001)
    assert not costs.worth_fetching(10)


def test_a_store_that_was_slow_is_tried_again_now_and_then() -> None:
    costs = model(fetch_s_per_page=0.1, prefill_s_per_token=0.001)
    tried = [costs.worth_fetching(10) for _ in range(64)]
    assert 2 <= sum(tried) <= 8


def test_a_fetch_is_over_only_when_its_pages_are_on_the_device() -> None:
    costs = model(fetch_s_per_page=0.010, prefill_s_per_token=0.001)  # 16 ms to compute a page
    assert costs.worth_fetching(10)
    costs.observe_load(100, 100 * 0.008)
    assert not costs.worth_fetching(10)


def test_what_others_have_on_their_way_comes_first() -> None:
    costs = model(fetch_s_per_page=0.010, prefill_s_per_token=0.001)
    assert costs.worth_fetching(100, ahead=50)
    assert not costs.worth_fetching(100, ahead=70)


def test_fetches_that_share_a_line_do_not_make_it_look_slow() -> None:
    """Eight at once take eight times as long as one alone, each."""
    costs = CostModel(enabled=True, page_size=PAGE)
    costs.observe_prefill(1000, 1000 * 0.001)
    for _ in range(8):
        costs.observe_fetch(10 + 70, 80 * 0.010)
    assert costs.worth_fetching(10)


def test_both_is_chosen_where_neither_alone_is_best() -> None:
    ways = {
        fetch_s: model(fetch_s_per_page=fetch_s, prefill_s_per_token=0.001).choose(100)
        for fetch_s in (0.0005, 0.008, 0.016, 0.032, 0.5)  # 16 ms to compute a page
    }
    assert ways == {
        0.0005: Way.FETCH,
        0.008: Way.BOTH,
        0.016: Way.BOTH,
        0.032: Way.BOTH,
        0.5: Way.COMPUTE,
    }


def test_without_figures_or_where_both_is_impossible_it_is_one_of_the_two() -> None:
    assert CostModel(enabled=True, page_size=PAGE).choose(10) is Way.FETCH
    assert CostModel(enabled=False, page_size=PAGE).choose(10) is Way.FETCH
    costs = model(fetch_s_per_page=0.015, prefill_s_per_token=0.001)
    assert costs.choose(10, can_meet=False) is Way.FETCH
    costs = model(fetch_s_per_page=0.017, prefill_s_per_token=0.001)
    assert costs.choose(10, can_meet=False) is Way.COMPUTE


def test_what_is_ahead_makes_computing_the_better_part_of_both() -> None:
    costs = model(fetch_s_per_page=0.016, prefill_s_per_token=0.001)
    assert costs.choose(100, ahead=20) is Way.BOTH
    assert costs.choose(100, ahead=200) is Way.COMPUTE


def test_a_slow_store_is_tried_again_while_the_front_is_computed() -> None:
    """So nobody waits for one that has not recovered."""
    costs = model(fetch_s_per_page=1.0, prefill_s_per_token=0.001)
    tried = {costs.choose(10) for _ in range(64)}
    assert tried == {Way.COMPUTE, Way.BOTH}


def test_a_way_may_be_forced() -> None:
    costs = model(fetch_s_per_page=1.0, prefill_s_per_token=0.001)
    for way in Way:
        costs.force(way)
        assert costs.choose(10) is way
    assert costs.choose(10, can_meet=False) is Way.FETCH
    costs.force(None)
    assert costs.choose(10) is Way.COMPUTE


def test_both_is_not_chosen_where_it_takes_longer_than_reckoned() -> None:
    """The two share a machine: what counts is what it took."""
    costs = model(fetch_s_per_page=0.016, prefill_s_per_token=0.001)
    assert costs.choose(100) is Way.BOTH
    reckoned_s = costs.meeting_s(100, 0)
    assert reckoned_s is not None
    costs.observe_meeting(reckoned_s, reckoned_s * 3)
    assert costs.choose(100) is not Way.BOTH
    assert costs.meeting_s(100, 0) == reckoned_s  # by the rates alone


def test_both_that_took_too_long_is_tried_again_now_and_then_and_may_recover() -> None:
    costs = model(fetch_s_per_page=0.016, prefill_s_per_token=0.001)
    costs.observe_meeting(1.0, 3.0)
    ways = [costs.choose(100) for _ in range(64)]
    assert 2 <= ways.count(Way.BOTH) <= 8
    for _ in range(2):
        costs.observe_meeting(1.0, 1.0)
    assert costs.choose(100) is Way.BOTH


def test_a_meeting_that_is_faster_than_reckoned_makes_nothing_look_better_than_it_is() -> None:
    costs = model(fetch_s_per_page=0.5, prefill_s_per_token=0.001)
    costs.observe_meeting(1.0, 0.1)
    assert costs.choose(100) is Way.COMPUTE


def test_another_store_is_not_judged_by_the_one_before() -> None:
    costs = model(fetch_s_per_page=0.1, prefill_s_per_token=0.001)
    assert not costs.worth_fetching(10)
    costs.forget_store()
    assert costs.worth_fetching(10)
