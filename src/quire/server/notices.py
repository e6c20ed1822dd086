"""What an operator should hear of, in the log, once when it begins and once when it is over.

    quiet ──failures──▶ said ──more──▶ counted ──none for a while──▶ said, with their number

Compares one EngineStatus with the one before it: a store that fails or heals, its breaker, peers
that come and go, requests that had to give up their pages. Notices knows no clock and no log: who
asks says what time it is, and gets sentences. `watched` asks it, while the server serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine.messages import EngineStatus
from quire.server.service import Service

_QUIET_S = 30.0
"""Trouble of one kind is over when nothing of it came for so long."""
WELL = ("ok", "miss", "cancelled")
"""What was given up here, since it was not needed any more, is nobody's failure."""
_BY_STORE = {"read": "fetch", "written": "write"}
"""What the store's client counts, and what the engine calls the same."""
_TAKES = {"read": "give", "written": "take"}
_LOOK_EVERY_S = 1.0
"""Reports come twice a second."""

logger = logging.getLogger("quire.events")


class Notice(NamedTuple):
    text: str
    is_good: bool
    fields: dict[str, Any]


@dataclass(slots=True)
class _Trouble:
    """One kind of failure, while it lasts."""

    count: int
    last_s: float


@dataclass(slots=True)
class Notices:
    _seen: dict[str, int] = field(default_factory=dict)
    _troubles: dict[str, _Trouble] = field(default_factory=dict)
    _silent: frozenset[int] = frozenset()
    """Which stores do not answer, by number."""
    _links: dict[str, str] = field(default_factory=dict)

    def look(self, status: EngineStatus, now_s: float) -> list[Notice]:
        notices = [*self._breaker(status), *self._peers(status)]
        for what, count, is_told in _failures(status):
            before = self._seen.get(what, 0)
            new = count - (before if before <= count else 0)  # another store counts from nothing
            self._seen[what] = count
            if not new or is_told:
                continue
            trouble = self._troubles.get(what)
            if trouble is None:
                self._troubles[what] = _Trouble(new, now_s)
                text = f"{what}: {new:,}; more are counted, and said when it is over"
                notices.append(Notice(text, False, {"event": what, "count": new}))
            else:
                trouble.count += new
                trouble.last_s = now_s
        for what, trouble in list(self._troubles.items()):
            if now_s - trouble.last_s >= _QUIET_S:
                del self._troubles[what]
                text = f"{what}: over, {trouble.count:,} in all"
                notices.append(Notice(text, True, {"event": what, "count": trouble.count}))
        return notices

    def _breaker(self, status: EngineStatus) -> Iterator[Notice]:
        stores = status.store.stores
        silent = frozenset(i for i, health in enumerate(stores) if not health.answers)
        for number in sorted(silent ^ self._silent):
            if number >= len(stores):
                continue  # it was taken away
            is_open = number in silent
            which = f"store {number}" if len(stores) > 1 else "the store"
            text = (
                f"{which} does not answer and is not asked for a while"
                if is_open
                else f"{which} answers again"
            )
            times = status.store.counters.get("breaker_opened", 0)
            said = {"event": "breaker", "store": number, "open": is_open, "times": times}
            yield Notice(text, not is_open, said)
        self._silent = silent

    def _peers(self, status: EngineStatus) -> Iterator[Notice]:
        links = status.handover.links if status.handover is not None else {}
        for peer, state in links.items():
            is_up, was_up = state == "connected", self._links.get(peer) == "connected"
            if is_up != was_up:
                text = f"peer {peer} is up" if is_up else f"peer {peer} is down: {state}"
                yield Notice(text, is_up, {"event": "peer", "peer": peer, "state": state})
        for peer in self._links.keys() - links.keys():
            if self._links[peer] == "connected":
                text = f"peer {peer} is not needed any more"
                yield Notice(text, True, {"event": "peer", "peer": peer, "state": "forgotten"})
        self._links = dict(links)


def _failures(status: EngineStatus) -> Iterator[tuple[str, int, bool]]:
    """Everything that went wrong so far, by a name for a person, and whether it is told already, as
    the store's client and the engine count the same."""
    told = set()
    for name, count in status.store.counters.items():
        kind, colon, what = name.partition(":")
        if not colon or not count:
            continue
        if kind in _BY_STORE and what not in WELL:
            told.add((_BY_STORE[kind], what))
            yield f"pages that the store did not {_TAKES[kind]} ({what})", count, False
        elif kind == "error":
            yield f"calls that the store failed ({what})", count, False
        elif kind == "mismatch":
            yield f"pages of the store that were not what they should be ({what})", count, False
    for name, count in status.counters.items():
        kind, _, what = name.partition(":")
        if kind not in ("backup", "load", "write", "fetch"):
            continue
        if what and what not in WELL and count:
            yield f"pages whose {kind} failed ({what})", count, (kind, what) in told
    if preempted := status.counters.get("requests_preempted", 0):
        yield "requests that gave up their device pages for others", preempted, False


@contextlib.asynccontextmanager
async def watched(service: Service) -> AsyncIterator[None]:
    """What the engine reports is looked at, and said if need be."""
    watching = asyncio.create_task(_watch(service), name="quire-watch")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(service: Service) -> None:
    notices = Notices()
    while True:
        status = service.engine.status
        if status is not None:
            for notice in notices.look(status, service.clock()):
                level = logging.INFO if notice.is_good else logging.WARNING
                logger.log(level, "%s", notice.text, extra={"fields": notice.fields})
        await asyncio.sleep(_LOOK_EVERY_S)
