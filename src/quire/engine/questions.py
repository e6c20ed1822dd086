"""Questions: what an administrator asks, answered at once or when the workers are done.

Knows the cache's manager. Nothing here waits: what takes time is looked at once per step. Nobody is
answered before the step after their question: what an earlier answer made due has begun by then, so
who asks after it whether pages are being moved is not told that all is quiet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.engine.eventlog import EventLog
from quire.engine.kvevents.publisher import EventPublisher
from quire.engine.messages import (
    Answer,
    Attach,
    CachedTokens,
    Detach,
    Drain,
    EngineStatus,
    Flush,
    Flushed,
    GetEvents,
    GetKeys,
    GetOutline,
    GetRequests,
    GetStatus,
    GetTenants,
    Keys,
    Outline,
    OutlineRun,
    Question,
    Requests,
    StoreStatus,
    Tenants,
    Warm,
    Warmed,
)
from quire.errors import ConfigError, QuireError
from quire.keys import Namespace, PrefixKey
from quire.manager import CacheManager, Lease, StoreChange
from quire.store.opening import only_read
from quire.types import DEVICE, HOST, RequestId

_TIERS = {"device": DEVICE, "host": HOST}
_STORE = "store"
_MAX_PENDING = 64


@dataclass(slots=True)
class _Changing:
    """A change of store that all ranks must agree to."""

    change: StoreChange
    result: Callable[[], object]


@dataclass(slots=True)
class _Warming:
    """A prompt on its way from the store."""

    lease: Lease
    num_tokens: int


class Questions:
    def __init__(
        self,
        manager: CacheManager,
        namespace_of: Callable[[str], Namespace],
        status: Callable[[], EngineStatus],
        *,
        requests: Callable[[], Requests],
        tenants: Callable[[], Tenants],
        drain: Callable[[], None],
        publisher: EventPublisher | None = None,
    ) -> None:
        """`drain`: take no more work of other engines. `publisher`: of the cache's events."""
        self._manager = manager
        self._namespace_of = namespace_of
        self._status = status
        self._requests = requests
        self._tenants = tenants
        self._drain = drain
        self._publisher = publisher
        self._events = EventLog()
        self._asked: list[tuple[int, Question]] = []
        self._pending: dict[int, _Changing | _Warming] = {}
        self._answers: list[Answer] = []

    @property
    def pending(self) -> int:
        return len(self._pending)

    def ask(self, number: int, question: Question) -> None:
        """One Answer will come for it, sooner or later."""
        self._asked.append((number, question))

    def advance(self) -> None:
        """Once per step, after the manager's: begin what was asked, and see what has come of those
        under way."""
        asked, self._asked = self._asked, []
        for number, question in asked:
            try:
                if len(self._pending) >= _MAX_PENDING:
                    raise ConfigError(
                        f"{_MAX_PENDING} questions are being answered: try again later"
                    )
                self._begin(number, question)
            except QuireError as error:
                self._answers.append(Answer(number, error=str(error)))
        for number, task in list(self._pending.items()):
            if isinstance(task, _Changing):
                if task.change.done:
                    self._end(number, task.result(), task.change.error)
            elif self._manager.ready(task.lease):
                self._end(number, self._warmed(task))

    def tell_events(self) -> None:
        """What has happened in the cache, to those who will ask and those who listen."""
        batch = self._manager.events.take()
        self._events.take_in(batch, self._manager.present)
        if self._publisher is not None:
            self._publisher.publish(batch, self._manager.present)

    def take_answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    # ---- inside ---------------------------------------------------------------------------------

    def _begin(self, number: int, question: Question) -> None:
        manager = self._manager
        match question:
            case GetStatus(check):
                if check:
                    manager.check_invariants()
                self._reply(number, self._status())
            case Drain():
                self._drain()
                self._reply(number, self._status())
            case Flush(tiers):
                self._flush(number, tiers)
            case Attach(url):
                self._pending[number] = _Changing(manager.store.attach(url), self._store)
            case Detach():
                self._pending[number] = _Changing(manager.store.detach(), self._store)
            case Warm(tokens, salt):
                self._warm(number, tokens, salt)
            case GetTenants():
                self._reply(number, self._tenants())
            case GetRequests():
                self._reply(number, self._requests())
            case GetEvents(since, cursor):
                self.tell_events()
                self._reply(number, self._events.since(since, cursor))
            case GetOutline(limit):
                self._reply(number, Outline([OutlineRun(*run) for run in manager.outline(limit)]))
            case GetKeys(tokens, salt):
                self._reply(number, self._keys(tokens, salt))

    def _keys(self, tokens: bytes, salt: str) -> Keys:
        ids = np.frombuffer(tokens, dtype="<i4")
        namespace = self._namespace_of(salt)
        key = PrefixKey(namespace, ids[: len(ids) - 1 + namespace.unit.overlap])
        return Keys(key.namespace.page_size, len(ids), key.page_keys())

    def _flush(self, number: int, tiers: list[str]) -> None:
        unknown = [tier for tier in tiers if tier not in (*_TIERS, _STORE)]
        if unknown or not tiers:
            raise ConfigError(f"tiers: {unknown or tiers} is not a choice of device, host, store")
        manager = self._manager
        change = manager.store.clear() if _STORE in tiers else None
        # The host first: a page that leaves the device is then not counted as kept there.
        flushed = Flushed(
            {name: manager.flush(tier) for name, tier in reversed(_TIERS.items()) if name in tiers},
            only_read(manager.store.url) if change else [],
        )
        if change is None:
            self._reply(number, flushed)
        else:
            self._pending[number] = _Changing(change, lambda: flushed)

    def _warm(self, number: int, tokens: bytes, salt: str) -> None:
        ids = np.frombuffer(tokens, dtype="<i4")
        key = PrefixKey(self._namespace_of(salt), ids)
        lease = self._manager.acquire(self._manager.match(key), RequestId(f"warm-{number}"))
        self._manager.prefetch(lease)
        self._pending[number] = _Warming(lease, len(ids))

    def _warmed(self, task: _Warming) -> Warmed:
        manager, lease = self._manager, task.lease
        size = manager.config.page_size
        manager.admit(lease)
        landed = lease.prefetch.num_landed if lease.prefetch is not None else 0
        store = min(landed, lease.num_host)
        cached = CachedTokens(
            device=lease.num_device * size,
            host=(lease.num_host - store) * size,
            store=store * size,
        )
        manager.release(lease)
        return Warmed(task.num_tokens, cached)

    def _store(self) -> StoreStatus:
        store = self._manager.store
        return StoreStatus(store.state.name.lower(), store.url)

    def _end(self, number: int, result: object, error: str = "") -> None:
        del self._pending[number]
        if error:
            self._answers.append(Answer(number, error=error))
        else:
            self._reply(number, result)

    def _reply(self, number: int, result: object) -> None:
        self._answers.append(Answer(number, msgspec.msgpack.encode(result)))
