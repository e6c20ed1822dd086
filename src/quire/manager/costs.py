"""CostModel: fetch, compute, or both at once? Fed by measured rates, optimistic without them.

    fetching    (pages on their way + its own) · seconds of one from the store + own · of a load
    computing   own · tokens of a page · seconds of one
    both        computed from the front while they come from the back, until they meet:
                    t / computing a page + (t - what is ahead) / fetching a page = own pages

A rate is that of the whole way, whoever shares it (see fetches/meter.py): many on their way at once
do not make it look slower than it is.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple

_SAMPLES = 9
_RETRY_EVERY = 16
_WORTH_BOTH = 1.05
"""So many times faster both must be than the better of the two alone: it costs the model's time,
which others could use, and the store's."""

_MISMATCH = 1 / 32
"""Of the pages, by which those who meet miss each other: half a part."""


class Way(enum.StrEnum):
    """How a request comes by the pages that the store has."""

    COMPUTE = "compute"
    FETCH = "fetch"
    BOTH = "both"


class Times(NamedTuple):
    compute_s: float
    fetch_s: float
    both_s: float

    @property
    def best_alone(self) -> Way:
        return Way.FETCH if self.fetch_s < self.compute_s else Way.COMPUTE

    @property
    def best(self) -> Way:
        if self.both_s * _WORTH_BOTH < min(self.fetch_s, self.compute_s):
            return Way.BOTH
        return self.best_alone


class _Rate:
    """Seconds per item: the median of the last few. The first ones, in which kernels are loaded
    and files are cold, may be a hundred times slower, and would spoil a mean for long."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.seconds_per_item: float | None = None

    def observe(self, items: float, seconds: float) -> None:
        if items <= 0 or seconds <= 0:
            return
        self._samples.append(seconds / items)
        self.seconds_per_item = sorted(self._samples)[len(self._samples) // 2]


class CostModel:
    def __init__(self, *, enabled: bool, page_size: int) -> None:
        self._enabled = enabled
        self._page_size = page_size
        self._fetch = _Rate()
        self._peer = _Rate()
        self._load = _Rate()
        self._prefill = _Rate()
        self._meeting = _Rate()
        """Seconds that meetings took, by each second that they were reckoned to take."""
        self._forced: Way | None = None
        self._declined_in_a_row = 0
        self._unmet_in_a_row = 0
        self._unasked_in_a_row = 0

    def observe_fetch(self, num_pages: int, seconds: float) -> None:
        """`num_pages`: of all that share the line."""
        self._fetch.observe(num_pages, seconds)

    def observe_peer(self, num_pages: int, seconds: float) -> None:
        """As of a fetch."""
        self._peer.observe(num_pages, seconds)

    def observe_load(self, num_pages: int, seconds: float) -> None:
        """From the host to the device."""
        self._load.observe(num_pages, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._prefill.observe(num_tokens, seconds)

    def observe_meeting(self, reckoned_s: float, seconds: float) -> None:
        """`reckoned_s`: as `meeting_s` said when it began."""
        self._meeting.observe(reckoned_s, seconds)

    def forget_store(self) -> None:
        """Another one is attached: how fast the one before was says nothing of it."""
        self._fetch, self._meeting = _Rate(), _Rate()

    def force(self, way: Way | None) -> None:
        """Always this way, whatever it costs; None: the best again. For measurements and tests."""
        self._forced = way

    def choose(
        self, num_pages: int, ahead: int = 0, *, can_meet: bool = True, pace: float = 1.0
    ) -> Way:
        """The fastest way to `num_pages` that the store has. `ahead`: pages that others have on
        their way. `can_meet`: both at once is possible. `pace`: how long one takes beside those
        that were fetched lately, where there are several stores. FETCH while a rate is unknown;
        and now and then the store is tried although computing is faster: stores recover."""
        if self._forced is not None:
            return Way.FETCH if self._forced is Way.BOTH and not can_meet else self._forced
        times = self.times(num_pages, ahead, pace)
        if times is None:
            return Way.FETCH
        way = times.best if can_meet else times.best_alone
        if can_meet and way is not Way.BOTH and self._is_retried(times):
            return Way.BOTH
        self._declined_in_a_row = self._declined_in_a_row + 1 if way is Way.COMPUTE else 0
        if self._declined_in_a_row >= _RETRY_EVERY:
            self._declined_in_a_row = 0
            return Way.BOTH if can_meet else Way.FETCH
        return way

    def _is_retried(self, times: Times) -> bool:
        """Is both at once chosen for once, although it took too long lately?"""
        reckoned = times._replace(both_s=times.both_s / self._slip)
        self._unmet_in_a_row = self._unmet_in_a_row + 1 if reckoned.best is Way.BOTH else 0
        if self._unmet_in_a_row < _RETRY_EVERY:
            return False
        self._unmet_in_a_row = 0
        return True

    @property
    def _slip(self) -> float:
        return max(1.0, self._meeting.seconds_per_item or 1.0)

    def meeting_s(self, num_pages: int, ahead: int, pace: float = 1.0) -> float | None:
        """How long both at once would take by the rates alone. None: not enough is known."""
        times = self.times(num_pages, ahead, pace)
        return None if times is None else times.both_s / self._slip

    def times(self, num_pages: int, ahead: float = 0, pace: float = 1.0) -> Times | None:
        """How long each way would take. None: not enough is known. `ahead`: as many pages as those
        that come first take as long as."""
        fetch, prefill = self._fetch.seconds_per_item, self._prefill.seconds_per_item
        if not self._enabled or fetch is None or prefill is None:
            return None
        load = self._load.seconds_per_item or 0.0
        page_s = prefill * self._page_size
        own_s = fetch * pace
        arrive_s = max(own_s, load)  # one while the other
        meet_s = (num_pages + ahead) / (1 / page_s + 1 / arrive_s)
        return Times(
            compute_s=page_s * num_pages,
            fetch_s=own_s * num_pages + fetch * ahead + load * num_pages,
            both_s=(meet_s + min(page_s, arrive_s) * num_pages * _MISMATCH) * self._slip,
        )

    def worth_fetching(self, num_pages: int, ahead: int = 0) -> bool:
        """Alone, without computing meanwhile."""
        return self.choose(num_pages, ahead, can_meet=False) is Way.FETCH

    def comes_first(
        self, num_pages: int, ahead: float, before: int, pace: float = 1.0
    ) -> bool | None:
        """Would these pages, after those `ahead`, be on the device before `before` pages are
        computed? None: not enough is known."""
        times = self.times(num_pages, ahead, pace)
        computed_s = self.compute_s(before)
        return None if times is None else times.fetch_s < computed_s

    def compute_s(self, num_pages: int) -> float:
        """How long it takes to compute them; 0 while that is unknown."""
        if not self._enabled:
            return 0.0
        return (self._prefill.seconds_per_item or 0.0) * num_pages * self._page_size

    def worth_asking_peers(self, num_pages: int) -> bool:
        """Would pages from a peer be here before they are computed? As for the store."""
        peer, prefill = self._peer.seconds_per_item, self._prefill.seconds_per_item
        if not self._enabled or peer is None or prefill is None:
            return True
        self._unasked_in_a_row += 1
        if peer < prefill * self._page_size or self._unasked_in_a_row >= _RETRY_EVERY:
            self._unasked_in_a_row = 0
            return num_pages > 0
        return False

    def peers_beat_store(self) -> bool:
        """Are pages here sooner from a peer than from the store, as far as is known?"""
        peer, fetch = self._peer.seconds_per_item, self._fetch.seconds_per_item
        return self._enabled and peer is not None and fetch is not None and peer < fetch
