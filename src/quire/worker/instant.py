"""InstantWorker: one rank that does at once all it is told, and a store of so many pages.

No bytes are moved: for whoever looks at what the leader decides, and at what that costs. The store
does what the leader may rely on: it gives up what was used longest ago, as far as it is told, of a
path the last page first, and takes no page whose parent it lacks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire.messages import (
    AttachStore,
    Backup,
    Cancel,
    Command,
    Completion,
    Disown,
    Fetch,
    Load,
    Probe,
    Probed,
    StoreChanged,
    Touch,
    Transferred,
    Write,
)
from quire.types import NO_PARENT, PageKey, PageStatus, num_pages, split_keys


class InstantWorker:
    def __init__(self, store_pages: float = float("inf")) -> None:
        self._store_pages = store_pages
        self._stored: OrderedDict[PageKey, None] = OrderedDict()
        """Coldest first."""

    def answer(self, commands: Sequence[Command]) -> list[Completion]:
        return [report for each in commands if (report := self.answer_one(each)) is not None]

    def answer_one(self, command: Command) -> Completion | None:
        match command:
            case Probe(op, component, queries):
                return Probed(op, 0, component, [self._leading(query) for query in queries])
            case AttachStore(op):
                return StoreChanged(op, 0)
            case Cancel() | Disown():
                return None
            case Touch():
                self._use(split_keys(command.keys)[: self._leading(command.keys)])
                return None
            case Fetch():
                present = [key in self._stored for key in split_keys(command.keys)]
                statuses = bytes(PageStatus.OK if each else PageStatus.MISS for each in present)
            case Write():
                keys, parents = command.keys_and_parents()
                statuses, found = self._write(keys, parents), b"".join(keys)
                return Transferred(command.op, 0, command.component, 0, statuses, True, 0.0, found)
            case Backup() | Load():
                statuses = bytes(num_pages(command.host))
            case _:
                raise AssertionError(f"nobody asks it for {type(command).__name__}")
        return Transferred(command.op, 0, command.component, 0, statuses, True)

    def _write(self, keys: Sequence[PageKey], parents: Sequence[PageKey]) -> bytes:
        taken, orphans = [], bytearray(len(keys))
        known = {NO_PARENT}
        for at, (key, parent) in enumerate(zip(keys, parents, strict=True)):
            if parent in known or parent in self._stored:
                known.add(key)
                taken.append(key)
            else:
                orphans[at] = PageStatus.ORPHAN
        self._use(taken)
        return bytes(orphans)

    def _use(self, path: Sequence[PageKey]) -> None:
        stored = self._stored
        for key in reversed(path):
            stored[key] = None
            stored.move_to_end(key)
        while len(stored) > self._store_pages:
            stored.popitem(last=False)

    def _leading(self, query: bytes) -> int:
        count = 0
        for key in split_keys(query):
            if key not in self._stored:
                break
            count += 1
        return count
