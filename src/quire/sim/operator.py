"""Operator: the person who attaches, detaches and clears stores and flushes tiers under load."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from quire.errors import WorkerError
from quire.manager import CacheManager, StoreChange, StoreState
from quire.sim.clock import VirtualClock
from quire.sim.report import SimulationError
from quire.sim.store import SimStores
from quire.types import Tier

_URLS = ("sim://one", "sim://two")
_MAX_CHANGE_S = 61.0


class Operator:
    def __init__(
        self, manager: CacheManager, stores: SimStores, clock: VirtualClock, rng: Random
    ) -> None:
        self._manager = manager
        self._stores = stores
        self._clock = clock
        self._rng = rng
        self._change: StoreChange | None = None
        self._asked_s = 0.0

    def act(self) -> None:
        """One administrative act; a store that is not there is attached first of all."""
        rng, manager = self._rng, self._manager
        luck = rng.random()
        if manager.store.state is StoreState.DETACHED:
            self._ask(lambda: manager.attach_store(rng.choice(_URLS)))
        elif luck < 0.5:
            manager.flush(rng.choice(list(Tier)))
        elif luck < 0.8:
            self._stores.forget(rng, rng.randrange(1, 6))
        elif manager.store.state is StoreState.ATTACHED:
            self._ask(
                rng.choice(
                    (
                        manager.detach_store,
                        manager.clear_store,
                        lambda: manager.attach_store(rng.choice(_URLS)),
                    )
                )
            )

    def check_changes(self) -> None:
        """No change may be pending for longer than its deadline."""
        change = self._change
        if change is not None and not change.done and self._clock() - self._asked_s > _MAX_CHANGE_S:
            raise SimulationError(f"the change to store {change.url!r} hangs")

    def _ask(self, ask: Callable[[], StoreChange]) -> None:
        self._asked_s = self._clock()
        try:
            self._change = ask()
        except WorkerError:
            self._change = None  # a rank is lost; said clearly, and nothing happened
