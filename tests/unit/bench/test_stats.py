"""Percentiles and ratios, on series whose answers are known."""

import random

import pytest

from quire.bench.stats import percentile, ratio, summary


def test_percentiles_lie_between_neighbours():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0, 0.5, 1)] == [1.0, 2.5, 4.0]
    assert percentile([7.0], 0.99) == 7.0
    assert percentile(list(range(101)), 0.9) == 90


def test_a_summary_of_nothing_is_nothing():
    assert summary([]) is None
    assert summary([2.0, 4.0]) == pytest.approx(
        {"mean": 3, "p50": 3, "p90": 3.8, "p99": 3.98, "min": 2, "max": 4}
    )


def test_the_interval_of_a_ratio_covers_what_is_true():
    chance = random.Random(1)
    base = [chance.uniform(0.9, 1.1) for _ in range(40)]
    ours = [value * 1.1 * chance.uniform(0.99, 1.01) for value in base]
    found = ratio(ours, base)
    for kind in ("of_medians", "of_means", "of_pairs"):
        assert found[kind]["low"] <= 1.1 <= found[kind]["high"]
    assert found["of_means"]["high"] - found["of_means"]["low"] < 0.02
    assert found["of_pairs"]["ratio"] == pytest.approx(1.1, abs=0.01)


def test_pairs_cancel_what_disturbs_both_sides():
    """A machine twice as slow half of the time widens each series, not their ratio."""
    slow = [1.0, 2.0] * 10
    found = ratio([1.01 * value for value in slow], slow)
    for kind in ("of_means", "of_pairs"):
        assert found[kind]["low"] == pytest.approx(1.01)
        assert found[kind]["high"] == pytest.approx(1.01)


def test_what_hits_one_side_of_a_few_pairs_is_left_out_of_the_median_pair():
    found = ratio([1.0] * 17 + [3.0] * 3, [1.0] * 20)
    assert found["of_means"]["ratio"] == pytest.approx(1.3)
    assert found["of_pairs"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}


def test_the_interval_is_the_same_each_time():
    ours, theirs = [1.0, 2.0, 5.0], [1.0, 1.5, 4.0]
    assert ratio(ours, theirs) == ratio(ours, theirs)


def test_series_of_different_length_have_no_ratio():
    with pytest.raises(ValueError, match="same length"):
        ratio([1.0], [1.0, 2.0])
