"""WatchedManager: the real manager, with what must hold of every single call checked around it.

    C34  a call that says no has changed nothing; only the refusal is counted
    C35  host pages go for want of host memory, and for no other reason
    C37  a page that is on its way from the store, where all will find it, is not fetched again
    C38  a request that goes on waiting keeps its prefetch
    C43  what is retained is found, and
    C44  a tenant that has its quota costs nobody else a page: see quire.sim.promises

Knows the manager's public calls; what they may change it reads through quire.sim.audit. C35, C43
and C44 are checked for full attention alone: with windows and snapshots, what nobody can go on from
is let go by design.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from quire.components import Component
from quire.config import CacheConfig
from quire.keys import PrefixKey
from quire.manager import CacheManager, Lease, Meetings, Prefetch, PrefixMatch
from quire.messages import (
    AttachStore,
    Cancel,
    ClearStore,
    Command,
    Completion,
    DetachStore,
    Fetch,
)
from quire.sim.audit import (
    evicted_from_host,
    imprint,
    is_awaited,
    is_prefetching,
    is_streamed,
    ready_host_pages,
)
from quire.sim.clock import VirtualClock
from quire.sim.promises import Promises
from quire.sim.report import SimulationError
from quire.types import NO_SLOT, OperationId, RequestId, split_keys

T = TypeVar("T")


class Rule(enum.Enum):
    NO_CHANGES_NOTHING = "C34"
    HOST_KEEPS = "C35"
    FETCHED_ONCE = "C37"
    PREFETCH_KEEPS = "C38"
    RETAINED_STAYS = "C43"
    QUOTA_IS_OWN = "C44"


RULES = frozenset(Rule)
FULL_ONLY = frozenset({Rule.HOST_KEEPS, Rule.RETAINED_STAYS, Rule.QUOTA_IS_OWN})


class _WatchedMeetings(Meetings):
    """The manager's own, which know no more than before; what they do is looked at."""

    def __init__(
        self,
        real: Meetings,
        asked: Callable[[str, Callable[[], bool]], bool],
        look: Callable[[str], None],
    ) -> None:
        vars(self).update(vars(real))
        self._asked = asked
        self._look = look

    def start(self, lease: Lease, limit: int) -> bool:
        return self._asked("meetings.start", partial(super().start, lease, limit))

    def met(self, lease: Lease, computed: int) -> int | None:
        page = super().met(lease, computed)
        self._look("meetings.met")
        return page


class WatchedManager(CacheManager):
    def __init__(
        self, config: CacheConfig, *, clock: VirtualClock, components: Sequence[Component]
    ) -> None:
        super().__init__(config, clock=clock, components=components)
        self._rules = RULES if len(components) == 1 else RULES - FULL_ONLY
        self._let_go: list[RequestId] = []
        """Owners of leases that were released while their prefetch was under way."""
        self._ready = ready_host_pages(self)
        self._evicted = 0
        self._coming: dict[OperationId, set[tuple[str, bytes]]] = {}
        """Fetches from the store, with what they bring."""
        self.meetings = _WatchedMeetings(self.meetings, self._asked, self._look)
        self._promises = Promises(self, clock)
        if Rule.QUOTA_IS_OWN in self._rules:
            vars(self._core)["reserve"] = self._promises.watch(self._core.reserve)

    # ---- calls that may say no ------------------------------------------------------------------

    def extend(self, lease: Lease, count: int) -> bool:
        return self._asked("extend", partial(super().extend, lease, count))

    def begin(self, lease: Lease) -> bool:
        return self._asked("begin", partial(super().begin, lease))

    def cover(self, lease: Lease, last: int) -> bool:
        return self._asked("cover", partial(super().cover, lease, last))

    def load(self, lease: Lease) -> int:
        return self._asked("load", partial(super().load, lease))

    def save_slot(self, lease: Lease) -> int:
        return self._asked("save_slot", partial(super().save_slot, lease), no=NO_SLOT)

    # ---- others ---------------------------------------------------------------------------------

    def acquire(self, match: PrefixMatch, owner: RequestId, **options: Any) -> Lease:
        lease = super().acquire(match, owner, **options)
        self._look("acquire")
        return lease

    def prefetch(self, lease: Lease, *, fetch: bool = True, can_meet: bool = False) -> Prefetch:
        prefetch = super().prefetch(lease, fetch=fetch, can_meet=can_meet)
        self._look("prefetch")
        return prefetch

    def admit(self, lease: Lease) -> int:
        count = super().admit(lease)
        self._look("admit")
        return count

    def commit(self, lease: Lease, key: PrefixKey) -> int:
        count = super().commit(lease, key)
        self._look("commit")
        return count

    def release(self, lease: Lease) -> None:
        if is_prefetching(lease):
            self._let_go.append(lease.owner)
        if Rule.RETAINED_STAYS in self._rules:
            self._promises.asked(lease)
        super().release(lease)
        self._look("release")

    def step(self, completions: Iterable[Completion] = ()) -> list[Command]:
        commands = super().step(completions)
        self._look("step")
        if Rule.FETCHED_ONCE in self._rules:
            self._look_at_fetches(commands)
        return commands

    def flush(self, tier: int, component: str | None = None) -> int:
        count = super().flush(tier, component)
        self._remember_host()
        self._promises.accept()
        return count

    def check_kept(self, is_waiting: Callable[[RequestId], bool]) -> None:
        """Call it when a step is over. `is_waiting`: does the request still want its pages?"""
        let_go, self._let_go = self._let_go, []
        if Rule.PREFETCH_KEEPS in self._rules:
            for owner in let_go:
                if is_waiting(owner):
                    raise _broken(Rule.PREFETCH_KEEPS, f"{owner} waits, and its prefetch is gone")

    # ---- inside ---------------------------------------------------------------------------------

    def _asked(self, name: str, call: Callable[[], T], no: int = 0) -> T:
        before = imprint(self)
        result = call()
        if result == no and Rule.NO_CHANGES_NOTHING in self._rules:
            changed = {what: n for what, n in imprint(self).items() if n != before.get(what)}
            if changed:
                was = {what: before.get(what) for what in changed}
                raise _broken(
                    Rule.NO_CHANGES_NOTHING, f"{name} said no, and {was} became {changed}"
                )
        self._look(name)
        return result

    def _look(self, name: str) -> None:
        """A call is over."""
        self._look_at_host(name)
        if Rule.RETAINED_STAYS in self._rules:
            self._promises.look(name)

    def _look_at_host(self, name: str) -> None:
        before, evicted = self._ready, self._evicted
        self._remember_host()
        lost = len(before - self._ready)
        if Rule.HOST_KEEPS in self._rules and lost > self._evicted - evicted:
            for_want = self._evicted - evicted
            raise _broken(
                Rule.HOST_KEEPS,
                f"{name} lost {lost} host pages, {for_want} of them for want of host memory",
            )

    def _remember_host(self) -> None:
        self._ready, self._evicted = ready_host_pages(self), evicted_from_host(self)

    def _is_for_all(self, op: OperationId) -> bool:
        return is_awaited(self, op) and not is_streamed(self, op)

    def _look_at_fetches(self, commands: list[Command]) -> None:
        self._coming = {op: what for op, what in self._coming.items() if is_awaited(self, op)}
        for command in commands:
            match command:
                case AttachStore() | DetachStore() | ClearStore():
                    self._coming.clear()  # what it brings may not be what is there now
                case Cancel(op):
                    self._coming.pop(op, None)
                case Fetch(source=None, op=op) if self._is_for_all(op):
                    what = {(command.component, key) for key in split_keys(command.keys)}
                    for op, others in self._coming.items():
                        if op != command.op and (twice := what & others):
                            raise _broken(
                                Rule.FETCHED_ONCE,
                                f"{len(twice)} pages of {command.op} are on their way by {op}",
                            )
                    self._coming.setdefault(command.op, set()).update(what)
                case _:
                    pass


def _broken(rule: Rule, what: str) -> SimulationError:
    return SimulationError(f"{rule.value}: {what}")
