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

_URLS = ("sim://one", "sim://one", "sim://one", "sim://two")
_REATTACH_CHANCE = 0.1
_MAX_CHANGE_S = 150.0  # as long as a change may take, and undoing it


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

    def attach(self) -> None:
        self._ask(lambda: self._manager.store.attach(self._rng.choice(_URLS)))

    def tend(self) -> None:
        """A store that went away comes back before long."""
        detached = self._manager.store.state is StoreState.DETACHED
        if detached and self._rng.random() < _REATTACH_CHANCE:
            self.attach()

    def act(self) -> None:
        """One act: mostly flushing a tier or losing stored pages, sometimes another store."""
        rng, manager = self._rng, self._manager
        luck = rng.random()
        if luck < 0.15:
            manager.flush(rng.choice(list(Tier)))
        elif luck < 0.3:
            component = rng.choice(manager.components)
            manager.flush(rng.choice(list(Tier)), component.name)
        elif luck < 0.6:  # as after a restart: only the store is left
            manager.flush(Tier.DEVICE)
            manager.flush(Tier.HOST)
        elif luck < 0.85:
            self._stores.forget(rng, rng.randrange(1, 6))
        elif manager.store.state is StoreState.ATTACHED:
            if luck < 0.9:
                self._ask(manager.store.detach)
            elif luck < 0.93:
                self._ask(manager.store.clear)
            else:
                self.attach()

    def check_changes(self) -> None:
        """No change may be pending for longer than its deadlines."""
        change = self._change
        if change is not None and not change.done and self._clock() - self._asked_s > _MAX_CHANGE_S:
            raise SimulationError(f"the change to store {change.url!r} hangs")

    def _ask(self, ask: Callable[[], StoreChange]) -> None:
        self._asked_s = self._clock()
        try:
            self._change = ask()
        except WorkerError:
            self._change = None  # a rank is lost; said clearly, and nothing happened
