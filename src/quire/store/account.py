"""Account: how the stores of a worker are at the moment, and what they have counted.

Small enough to come with a sign of life from a rank's process. Knows no store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec


class StoreBudget(msgspec.Struct, frozen=True):
    """Of a store that has one of its own."""

    used_bytes: int
    max_bytes: int
    is_shared: bool
    """It is one budget, whoever says it; else each process has its own."""


class StoreHealth(msgspec.Struct, frozen=True):
    """Of one store."""

    answers: bool = True
    """Else its breaker is open, or a call does not come back: it is not asked for a while."""
    budget: StoreBudget | None = None
    read_us_per_page: int | None = None
    """Of several stores, what a page took that was read lately; None: none was."""


class StoreAccount(msgspec.Struct, frozen=True):
    """Of all stores of one worker, or of all workers."""

    counters: dict[str, int] = {}
    """See counters.py."""
    stores: list[StoreHealth] = []
    """In the order in which they were given. Empty: none is attached."""


def over_ranks(accounts: Iterable[StoreAccount]) -> StoreAccount:
    """Ranks have the same stores, each with a client of its own, and a page is there when all of
    them have it: a store answers if it answers all of them."""
    told = [account for account in accounts if account.stores or account.counters]
    counters: Counter[str] = Counter()
    for account in told:
        counters.update(account.counters)
    # Of different numbers while some have attached a store and others have not yet.
    num_stores = min((len(account.stores) for account in told), default=0)
    stores = [_merged([account.stores[i] for account in told]) for i in range(num_stores)]
    return StoreAccount(dict(counters), stores)


def _merged(each: Sequence[StoreHealth]) -> StoreHealth:
    budgets = [health.budget for health in each if health.budget is not None]
    budget = None
    if budgets:
        together = max if budgets[0].is_shared else sum
        budget = StoreBudget(
            together([budget.used_bytes for budget in budgets]),
            together([budget.max_bytes for budget in budgets]),
            budgets[0].is_shared,
        )
    took = [health.read_us_per_page for health in each if health.read_us_per_page is not None]
    answers = all(health.answers for health in each)
    return StoreHealth(answers, budget, max(took, default=None))
