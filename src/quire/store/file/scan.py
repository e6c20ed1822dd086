"""The background look at a file store's directory: what is there, in which order, how much.

One thread per store: once at opening, then when the owner has written a quarter of the budget or
asks, at most every `MIN_INTERVAL_S`. Also removes what dead writers left unfinished.
Knows layout and budget; moves no page.
"""

from __future__ import annotations

import contextlib
import threading

from quire.store.file.budget import Budget, Ledger
from quire.store.file.layout import NUM_SHARDS, Layout

MIN_INTERVAL_S = 10.0
PAUSE_S = 0.0005
"""Between two shard directories: a scan of a million files must not hog the interpreter."""


class Scanner:
    def __init__(self, layout: Layout, budget: Budget, ledger: Ledger) -> None:
        self.scanned = threading.Event()
        self._layout = layout
        self._budget = budget
        self._ledger = ledger
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._written_bytes = 0
        self._thread = threading.Thread(target=self._run, name="quire-store-scan", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        self._wanted.set()

    def wrote(self, num_bytes: int) -> None:
        # Unlocked: a lost update delays the next scan a little.
        self._written_bytes += num_bytes
        if self._written_bytes > self._budget.max_bytes // 4:
            self._written_bytes = 0
            self._wanted.set()

    def close(self) -> None:
        self._closed.set()
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # the disk is in trouble: the next scan may do
                self._scan()
            self.scanned.set()
            self._closed.wait(MIN_INTERVAL_S)
            self._wanted.wait()
            self._wanted.clear()

    def _scan(self) -> None:
        total_before = self._ledger.total()
        known = self._budget.names()
        found: dict[str, tuple[float, int]] = {}
        for shard in range(NUM_SHARDS):
            for text, stat in self._layout.scan_shard(shard):
                found[text] = (stat.st_mtime, stat.st_size)
            if self._closed.is_set() or (found and self._closed.wait(PAUSE_S)):
                return
        self._ledger.correct(total_before, sum(size for _, size in found.values()))
        new = sorted((item for item in found.items() if item[0] not in known), key=lambda i: i[1])
        self._budget.learn(
            ((text, size) for text, (_, size) in new),
            known - found.keys(),
            as_cold=not self.scanned.is_set(),
        )
