"""StoreControl: attach, detach and clear the store at run time, under load.

No request fails for it. From the moment a change is asked for until all ranks have agreed to it,
the cache runs without a store; operations already under way end on the store they began with.
Every attachment and every clearing is a new *epoch*: what a node knew to be stored no longer
counts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError, StoreError, WorkerError
from quire.manager.core import Core, StoreUse
from quire.manager.operations import WHOLE, Operation, OperationKind, OpState
from quire.messages import AttachStore, ClearStore, DetachStore

TIMEOUT_S = 60.0


class StoreState(enum.Enum):
    DETACHED = enum.auto()
    CHANGING = enum.auto()
    ATTACHED = enum.auto()


@dataclass(slots=True, eq=False)
class StoreChange:
    """A change asked for. `error` when a rank could not; `done` when every rank has answered and,
    after an error, has let go of the store: another change may be asked for then."""

    url: str
    """What will be attached when it is done; empty: nothing."""
    stays: bool = False
    """Attached even if it fails: pages that one rank still has and another does not are misses."""
    done: bool = False
    error: str = ""


class StoreControl:
    def __init__(self, core: Core, is_another: Callable[[], None]) -> None:
        """`is_another`: told when one is attached that was not there before."""
        self._core = core
        self._is_another = is_another
        self.state = StoreState.DETACHED
        self.url = ""

    def attach(self, url: str) -> StoreChange:
        """Use the store at `url`; replaces the one attached."""
        if self._core.config.host_pages == 0:
            raise ConfigError("a store needs a host tier: give host_pages a size or drop the store")
        change, op = self._begin(url)
        self._core.outbox.append(AttachStore(op.id, url))
        return change

    def detach(self) -> StoreChange:
        change, op = self._begin("")
        self._core.outbox.append(DetachStore(op.id))
        return change

    def clear(self) -> StoreChange:
        """Empty the attached store of everything it owns. A rank that fails or is late at it
        costs nothing but that its pages stay."""
        if self.state is not StoreState.ATTACHED:
            raise StoreError("no store is attached, so there is nothing to clear: attach one first")
        change, op = self._begin(self.url, stays=True)
        self._core.outbox.append(ClearStore(op.id))
        return change

    def use_of(self, tenant: str) -> StoreUse:
        """What was written for one of the last tenants, where quotas are kept."""
        return self._core.store_uses.get(tenant, StoreUse())

    def _begin(self, url: str, *, stays: bool = False) -> tuple[StoreChange, Operation]:
        if self.state is StoreState.CHANGING:
            raise StoreError("the store is being changed already: wait for that to finish")
        if not self._core.healthy:
            raise WorkerError(
                "a worker is lost and the store cannot be changed: restart the engine"
            )
        self.state = StoreState.CHANGING
        self._core.store_epoch = 0
        change = StoreChange(url, stays)
        return change, self._start(lambda op: self._reported(op, change))

    def _start(self, on_report: Callable[[Operation], None]) -> Operation:
        return self._core.operations.start(
            OperationKind.STORE,
            {WHOLE: 0},
            timeout_s=TIMEOUT_S,
            on_report=on_report,
        )

    def _reported(self, op: Operation, change: StoreChange) -> None:
        if op.state is OpState.RUNNING or change.done or change.error:
            return
        overdue = op.state is OpState.OVERDUE
        change.error = op.error or ("a worker did not answer in time" if overdue else "")
        if change.url and (change.stays or not change.error):
            if change.url != self.url:
                self._is_another()
            self.state, self.url = StoreState.ATTACHED, change.url
            self._core.next_epoch()
            change.done = True
        elif change.error and change.url and self._core.healthy:
            # Some rank could not follow, and none may go on alone. The change is done, and the
            # next one welcome, when all have let go.
            undo = self._start(lambda op: self._let_go(op, change))
            self._core.outbox.append(DetachStore(undo.id))
        else:
            self._let_go(op, change)

    def _let_go(self, op: Operation, change: StoreChange) -> None:
        if op.state is OpState.RUNNING or change.done:
            return
        self.state, self.url = StoreState.DETACHED, ""
        change.done = True
