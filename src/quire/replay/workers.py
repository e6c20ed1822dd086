"""InstantWorkers: one rank that does at once all it is told, and a store of so many pages.

No bytes are moved: what is replayed is what the leader decides. The store gives up what was used
longest ago, and no page before those that need it: `used` tells it the whole prefix that a request
has asked for, wherever it was found.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.manager import CacheManager
from quire.messages import (
    AttachStore,
    Backup,
    Cancel,
    Command,
    Completion,
    Fetch,
    Load,
    Probe,
    Probed,
    StoreChanged,
    Touch,
    Transferred,
    Write,
)
from quire.types import PageKey, PageStatus, num_pages, split_keys


class InstantWorkers:
    def __init__(self, manager: CacheManager, store_pages: int) -> None:
        self._manager = manager
        self._store_pages = store_pages
        self._stored: dict[PageKey, None] = {}
        """Coldest first."""
        if store_pages:
            manager.attach_store("replay://")
            self.settle()

    def settle(self) -> None:
        """Step until nobody has anything more to do."""
        commands = self._manager.step()
        while commands:
            reports = [report for each in commands if (report := self._answer(each)) is not None]
            commands = self._manager.step(reports)

    def used(self, keys: bytes) -> None:
        """A request has asked for this prefix."""
        self._touch(key for key in reversed(split_keys(keys)) if key in self._stored)

    def _answer(self, command: Command) -> Completion | None:
        match command:
            case Probe(op, component, queries):
                return Probed(op, 0, component, [self._leading(query) for query in queries])
            case AttachStore(op):
                return StoreChanged(op, 0)
            case Cancel():
                return None
            case Touch(_, keys):
                self.used(keys)
                return None
            case Fetch():
                found = [key in self._stored for key in split_keys(command.keys)]
                statuses = bytes(PageStatus.OK if each else PageStatus.MISS for each in found)
            case Write():
                self._touch(reversed(split_keys(command.keys)))
                statuses = bytes(num_pages(command.host))
            case Backup() | Load():
                statuses = bytes(num_pages(command.host))
            case _:
                raise AssertionError(f"a replay asks for no {type(command).__name__}")
        return Transferred(command.op, 0, command.component, 0, statuses, True)

    def _touch(self, keys: Iterable[PageKey]) -> None:
        stored = self._stored
        for key in keys:
            stored.pop(key, None)
            stored[key] = None
        while len(stored) > self._store_pages:
            del stored[next(iter(stored))]

    def _leading(self, query: bytes) -> int:
        count = 0
        for key in split_keys(query):
            if key not in self._stored:
                break
            count += 1
        return count
