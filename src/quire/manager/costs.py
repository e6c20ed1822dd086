"""CostModel: does fetching beat recomputing? Fed by measured rates, optimistic without them.

    fetching    (pages on their way + its own) · seconds of one from the store + own · of a load
    computing   own · tokens of a page · seconds of one

A rate is that of the whole way: what was on its way when a fetch began counts with its own pages,
so many that share a line do not make it look slower than it is.
"""

from __future__ import annotations

from collections import deque

_SAMPLES = 9
_RETRY_EVERY = 16


class _Rate:
    """Seconds per item: the median of the last few. The first ones, in which kernels are loaded
    and files are cold, may be a hundred times slower, and would spoil a mean for long."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.seconds_per_item: float | None = None

    def observe(self, items: int, seconds: float) -> None:
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
        self._declined_in_a_row = 0
        self._unasked_in_a_row = 0

    def observe_fetch(self, num_pages: int, seconds: float) -> None:
        """`num_pages`: its own, and those that were on their way when it began."""
        self._fetch.observe(num_pages, seconds)

    def observe_peer(self, num_pages: int, seconds: float) -> None:
        """As of a fetch."""
        self._peer.observe(num_pages, seconds)

    def observe_load(self, num_pages: int, seconds: float) -> None:
        """From the host to the device."""
        self._load.observe(num_pages, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._prefill.observe(num_tokens, seconds)

    def worth_fetching(self, num_pages: int, ahead: int = 0) -> bool:
        """`ahead`: pages that others have on their way. True while a rate is unknown, and now and
        then although it is not: stores recover."""
        fetch, prefill = self._fetch.seconds_per_item, self._prefill.seconds_per_item
        if not self._enabled or fetch is None or prefill is None:
            return True
        load = self._load.seconds_per_item or 0.0
        here_s = fetch * (num_pages + ahead) + load * num_pages
        if here_s < prefill * num_pages * self._page_size:
            self._declined_in_a_row = 0
            return True
        self._declined_in_a_row += 1
        if self._declined_in_a_row >= _RETRY_EVERY:
            self._declined_in_a_row = 0
            return True
        return False

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
