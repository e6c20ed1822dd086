"""Auditor: in idle time, computes some cached page again and compares it with what the tiers hold.

    begin ──▶ its copies are brought ──▶ computed, compared ──▶ right: nothing │ wrong: evicted
      ▲                                                              │                │
      ├──────────────── after so long that it took `share` of the time ◀───┘                │
      └─────── at once: is the page before it right, or does it stand on a wrong one? ◀──────┘

The rule: the same tokens on the same pages before them give the same page. In float32 up to the
order of sums; in half precision as near as that dtype is to itself (docs/precision.md). A page that
is wrong, or of another prompt, is a hundred times farther off. The device's and the host's copies
must be the same to the last bit; the store's may be another engine's computation, and its digest is
looked at as it is read.

With requests there it begins nothing and computes nothing: what was begun is let go of. Knows the
manager's audits and an executor that can compare two pages.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from quire.engine.batch import Batch, Segment
from quire.keys import Namespace, PrefixKey
from quire.manager import Audit, AuditState, CacheManager
from quire.types import PAGE_ID_BYTES, PageIds, RequestId, page_array

logger = logging.getLogger("quire.audit")

MOST_OFF = {"float32": 1e-3, "float16": 0.25, "bfloat16": 0.5}
"""How far a value may lie off, in units of the root of the mean square of its layer's."""
_WRONG = "not what the model computes"
_COPIES_DIFFER = "not the same on device and host, though near enough: a bit may have changed there"
_NUMBER = 0
"""Of its batches, which nobody else counts."""


@runtime_checkable
class Comparing(Protocol):
    """What it needs of an executor."""

    def launch(self, batch: Batch) -> None: ...

    def collect(self, meanwhile: Callable[[], None]) -> object: ...

    def difference(self, page: int, other: int) -> float:
        """The largest of two device pages, in units of the root of the mean square of its layer's
        values; infinite if one of them is no number."""


@dataclass(slots=True)
class _Search:
    """For the first wrong page of a prompt: what is computed on top of it differs as well.

    pages   [0 ····· low ············ high ·····)
             right  │ nobody knows   │ wrong, evicted
    """

    key: PrefixKey
    low: int
    high: int
    at: int
    """The page to look at: the one before at first, which is right unless the fault lies deeper;
    then the middle."""

    @property
    def is_over(self) -> bool:
        return self.low >= self.high

    def take(self, *, is_right: bool) -> None:
        if is_right:
            self.low = self.at + 1
        else:
            self.high = self.at
        self.at = (self.low + self.high) // 2


class Auditor:
    def __init__(
        self,
        manager: CacheManager,
        executor: Comparing,
        namespaces: Callable[[], Sequence[Namespace]],
        *,
        dtype: str,
        share: float,
        clock: Callable[[], float],
        seed: int | None = None,
    ) -> None:
        """`namespaces`: those that are in use. `share` of idle time goes into it."""
        self._manager = manager
        self._executor = executor
        self._namespaces = namespaces
        self._most_off = MOST_OFF[dtype]
        self._share = share
        self._clock = clock
        self._random = random.Random(seed)
        self._audit: Audit | None = None
        self._search: _Search | None = None
        self._next_s = 0.0

    def step(self, *, idle: bool) -> None:
        """Once per step, after all else. Raises whatever the executor does."""
        audit = self._audit
        if audit is None:
            if idle and self._manager.idle and self._clock() >= self._next_s:
                self._begin()
            return
        if audit.state is AuditState.READY:
            self._audit = None
            if idle and audit.is_whole:
                self._inspect(audit)
            else:
                self._manager.audits.end(audit)

    def _begin(self) -> None:
        search, audits = self._search, self._manager.audits
        if search is not None:
            key = search.key[: search.at + 1]
            if self._manager.match(key).num_pages < key.last:  # it has gone by itself
                self._search = None
                return
            self._audit = audits.begin_at(key)
        elif found := self._namespaces():
            namespace = self._random.choice(found)
            self._audit = audits.begin(namespace, self._random.randrange)
        if self._audit is None:
            self._next_s = self._clock() + 1.0

    def _inspect(self, audit: Audit) -> None:
        began = self._clock()
        audits, counters = self._manager.audits, self._manager.counters
        try:
            self._compute(audit)
            computed = _only(PageIds(audit.table[-PAGE_ID_BYTES:]))
            pages = {tier: _only(page) for tier, page in audit.copies.items()}
            off = {tier: self._executor.difference(page, computed) for tier, page in pages.items()}
            apart = 0.0
            if {"device", "host"} <= pages.keys():
                apart = self._executor.difference(pages["host"], pages["device"])
        finally:
            audits.end(audit)
        counters.audited_pages += 1
        wrong = {tier: by for tier, by in off.items() if not by <= self._most_off}
        for tier in wrong:
            counters.faults[f"audit:wrong_{tier}"] += 1
        if wrong:
            _complain(audit, _WRONG, wrong, audits.evict(audit.key))
        elif apart:
            counters.faults["audit:copies_differ"] += 1
            _complain(audit, _COPIES_DIFFER, {"host": apart}, audits.evict(audit.key))
        self._follow_up(audit, is_right=not wrong)
        if self._search is None:
            now = self._clock()
            self._next_s = now + (now - began) * (1 / self._share - 1)

    def _follow_up(self, audit: Audit, *, is_right: bool) -> None:
        page = audit.key.last - 1
        if self._search is not None:
            self._search.take(is_right=is_right)
        elif not is_right:
            self._search = _Search(audit.key, 0, page, page - 1)
        if self._search is not None and self._search.is_over:
            self._search = None

    def _compute(self, audit: Audit) -> None:
        key = audit.key
        page = key.last - 1
        segment = Segment(
            id=RequestId("audit"),
            tokens=bytes(key.page_tokens(page, page + 1)),
            start=page * key.namespace.page_size,
            pages=audit.table,
            loads=[],
            row=None,
        )
        self._executor.launch(Batch(_NUMBER, [segment]))
        self._executor.collect(lambda: None)


def _complain(audit: Audit, what: str, off: dict[str, float], gone: int) -> None:
    fields = {
        "event": "audit",
        "page": audit.key.last - 1,
        "key": audit.key.page_keys(audit.key.last - 1).hex(),
        "off": {tier: float(f"{by:.3g}") for tier, by in off.items()},
        "evicted_pages": gone,
    }
    logger.error(
        "audit: page %d of a cached prompt is %s (%s): evicted from every tier, with what was "
        "computed on top of it",
        fields["page"],
        what,
        ", ".join(f"{tier} off by {by:.3g}" for tier, by in off.items()),
        extra={"fields": fields},
    )


def _only(pages: PageIds) -> int:
    return int(page_array(pages)[0])
