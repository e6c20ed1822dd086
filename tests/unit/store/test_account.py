"""How stores stand over all ranks: what is one for all is counted once."""

import pytest

from quire.store.account import StoreAccount, StoreBudget, StoreHealth, over_ranks


def test_counters_are_added_and_a_store_answers_if_it_answers_all():
    found = over_ranks(
        [
            StoreAccount({"read:ok": 1}, [StoreHealth(), StoreHealth(answers=False)]),
            StoreAccount({"read:ok": 2, "read:miss": 3}, [StoreHealth(), StoreHealth()]),
        ]
    )
    assert found == StoreAccount(
        {"read:ok": 3, "read:miss": 3}, [StoreHealth(), StoreHealth(answers=False)]
    )


@pytest.mark.parametrize(("is_shared", "used", "most"), [(True, 7, 9), (False, 12, 18)])
def test_a_budget_that_all_share_is_one(is_shared, used, most):
    ranks = [StoreBudget(5, 9, is_shared), StoreBudget(7, 9, is_shared)]
    found = over_ranks(StoreAccount({}, [StoreHealth(budget=budget)]) for budget in ranks)
    assert found.stores == [StoreHealth(budget=StoreBudget(used, most, is_shared))]


def test_what_a_page_takes_is_that_of_the_slowest_rank_not_of_all_together():
    ranks = [StoreHealth(read_us_per_page=us) for us in (None, 40, 70)]
    assert over_ranks(StoreAccount({}, [each]) for each in ranks).stores == ranks[2:]


def test_who_has_none_attached_yet_says_nothing():
    one = StoreAccount({"read:ok": 1}, [StoreHealth()])
    assert over_ranks([one, StoreAccount()]) == one
    assert over_ranks([StoreAccount()]) == StoreAccount()
