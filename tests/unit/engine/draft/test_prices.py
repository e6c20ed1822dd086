"""What proposals cost is what steps with them took longer than steps without."""

import pytest

from quire.engine.draft.prices import StepPrices


def taught(plain_s: float, per_token_s: float, *, num_requests: int = 1, steps: int = 60):
    prices = StepPrices()
    for _ in range(4):
        prices.observe(num_requests, num_requests, plain_s)
    for step in range(steps):
        proposed = 1 + step % 4
        seconds = plain_s + per_token_s * proposed
        prices.observe(num_requests, num_requests * (1 + proposed), seconds)
    return prices


@pytest.mark.parametrize("per_token_s", [0.0, 0.001, 0.002, 0.004])
def test_prices_come_near_to_what_was_measured(per_token_s: float) -> None:
    price = taught(0.01, per_token_s).price(1)
    assert price is not None
    assert price.cost(3) == pytest.approx(1 + 3 * per_token_s / 0.01, rel=0.05)


def test_before_there_is_anything_to_compare_with_nothing_is_proposed() -> None:
    prices = StepPrices()
    assert prices.price(1) is None
    for _ in range(4):
        prices.observe(1, 1, 0.01)
    assert prices.price(1) is not None
    assert prices.price(8) is None, "others may cost otherwise"


def test_now_and_then_a_step_without_proposals_is_due() -> None:
    prices = taught(0.01, 0.001, steps=64)
    assert prices.price(1) is None
    prices.observe(1, 1, 0.01)
    assert prices.price(1) is not None


def test_a_step_that_was_held_up_counts_like_a_dear_one_and_no_more() -> None:
    prices = taught(0.01, 0.0, steps=30)
    prices.observe(1, 5, 60.0)
    price = prices.price(1)
    assert price is not None
    assert price.cost(4) < 1.2
