"""How many tokens are proposed, over simulated acceptance."""

import random

import pytest

from quire.engine.draft.adaptive import DraftLength, DraftPrice

MAX = 6


def drafted(rate, count, chance):
    """How many of `count` proposals are accepted, each with this share."""
    accepted = 0
    while accepted < count and chance.random() < rate:
        accepted += 1
    return accepted


def simulate(rate_at, price, steps, seed, choose=None):
    """(tokens per price paid, lengths chosen) of a run where step i has acceptance rate_at(i)."""
    chance, length = random.Random(seed), DraftLength(MAX)
    tokens, paid, chosen = 0, 0.0, []
    for step in range(steps):
        count = length.choose(price) if choose is None else choose
        accepted = drafted(rate_at(step), count, chance)
        length.saw(count, accepted)
        tokens += accepted + 1
        paid += price.cost(count)
        chosen.append(count)
    return tokens / paid, chosen


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("price", [DraftPrice(0.07), DraftPrice(0.12, 0.1), DraftPrice(0.4)])
def test_it_comes_close_to_the_best_fixed_length(rate, price):
    best = max(simulate(lambda _: rate, price, 4000, 1, fixed)[0] for fixed in range(MAX + 1))
    own, _ = simulate(lambda _: rate, price, 4000, 2)
    assert own > 0.93 * best


def test_where_it_does_not_pay_almost_nothing_is_proposed():
    gain, chosen = simulate(lambda _: 0.05, DraftPrice(0.3), 5000, 3)
    assert gain > 0.99
    assert 0 < sum(map(bool, chosen[200:])) < 100  # it tries again now and then


@pytest.mark.parametrize("seed", range(5))
def test_it_begins_again_when_drafts_are_accepted_again(seed):
    _, chosen = simulate(lambda step: 0.02 if step < 1000 else 0.9, DraftPrice(0.1), 3500, seed)
    assert sum(chosen[500:1000]) < 30
    assert sum(chosen[-200:]) > 200 * 3


@pytest.mark.parametrize("seed", range(5))
def test_it_stops_soon_when_drafts_are_no_longer_accepted(seed):
    _, chosen = simulate(lambda step: 0.9 if step < 500 else 0.0, DraftPrice(0.2), 700, seed)
    assert min(chosen[400:500]) > 0
    assert sum(chosen[560:]) < 15


def test_the_same_drafts_pay_at_one_price_and_not_at_another():
    length = DraftLength(MAX)
    for _ in range(50):
        length.saw(3, 2)
    assert length.best(DraftPrice(0.05)) > 0
    assert length.best(DraftPrice(1.5)) == 0
    assert DraftPrice(0.2, 0.1).cost(0) == 1.0
    assert DraftPrice(0.2, 0.1).cost(2) == pytest.approx(1.5)


def test_an_empty_draft_tells_nothing():
    length = DraftLength(MAX)
    before = length.rates
    length.saw(0, 0)
    assert length.rates == before


def test_only_positions_that_were_reached_count():
    length = DraftLength(3)
    for _ in range(200):
        length.saw(3, 1)
    first, second, third = length.rates
    assert first > 0.95
    assert second < 0.1
    assert third == pytest.approx(second)  # never reached: believed to be like the one before


def test_with_no_room_for_drafts_there_are_none():
    length = DraftLength(0)
    assert [length.choose(DraftPrice(0.1)) for _ in range(100)] == [0] * 100
