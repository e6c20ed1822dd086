"""The background look at a file store's directory: which objects are coldest, how much is used.

One thread per store: at opening, then when the owner has written the budget once over or asks,
at most every `MIN_INTERVAL_S`; and only one of all processes at a time. Also removes what dead
writers left unfinished, and what was cleared. A small directory is looked at where it is needed.
Knows layout, ledger and queue; moves no page. Holds the names while it looks, packed.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

from quire.errors import StoreError
from quire.store.file.budget import Ledger, SpaceUsed
from quire.store.file.cold import ColdQueue, FoundObjects
from quire.store.file.layout import Layout
from quire.store.file.shared_file import SharedFile

MIN_INTERVAL_S = 10.0
PIECE_OBJECTS = 128
"""Looked at between two pauses. A thread that makes many short system calls hardly ever lets others
have the interpreter, though each call releases it: they get it in the pauses."""
PAUSE_S = 0.0001
BUSY_S = 0.005
"""Between two attempts while another process scans."""
MAX_STUCK = 200
"""Times that nothing could be deleted of what was cleared: then it cannot be."""
SMALL_OBJECTS = 4096
"""A directory of so few is scanned only by whoever needs room in it."""
MAX_WAIT_OBJECTS = 1 << 16
"""With more, nobody waits for a scan: writes are turned away until it has ended."""
CLOSE_TIMEOUT_S = 5.0


class Scanner:
    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        cold: ColdQueue,
        *,
        scan_every_bytes: int,
        wall_ns: Callable[[], int],
        sweep: Callable[[int], None],
    ) -> None:
        """`sweep(scan_start_ns)` is called behind every scan. Raises OSError."""
        self.scanned = threading.Event()
        self._layout = layout
        self._ledger = ledger
        self._cold = cold
        self._scan_every_bytes = scan_every_bytes
        self._wall_ns = wall_ns
        self._sweep = sweep
        self._only_one = SharedFile(layout.scan_path)
        self._wanted = threading.Event()
        self._at_once = threading.Event()
        self._closed = threading.Event()
        self._written_bytes = 0
        self._cleared: Iterator[int] = iter(())
        self._clearing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="quire-store-scan", daemon=True)
        self._thread.start()

    def ask(self, *, at_once: bool = False) -> None:
        if at_once:
            self._at_once.set()
        self._wanted.set()

    def wrote(self, num_bytes: int) -> None:
        # Unlocked: a lost update delays the next scan a little.
        self._written_bytes += num_bytes
        if self._written_bytes > self._scan_every_bytes:
            self._written_bytes = 0
            self.ask()
        is_small = self._ledger.known.num_objects <= SMALL_OBJECTS
        if self._cold.is_low and not is_small and not self._at_once.is_set():
            self.ask(at_once=True)

    def refill(self) -> bool:
        """The queue is empty and room is needed. True: look again."""
        if self._ledger.known.num_objects > MAX_WAIT_OBJECTS:
            self.ask(at_once=True)
            return False
        return self._alone(lambda: not self._cold.is_empty or self._scan(0.0) > 0)

    def clear(self) -> int:
        """Delete every object, and say how many: nobody else scans meanwhile. Raises StoreError:
        some of it cannot be deleted."""
        count = stuck = 0
        with self._only_one.locked():
            self._layout.discard()
            while self._layout.has_trash:
                removed = self._empty_trash()
                count += removed
                stuck = 0 if removed else stuck + 1
                if stuck > MAX_STUCK:
                    raise StoreError(
                        f"what was cleared is of no use any more, but {str(self._layout.root)!r} "
                        "has files in it that cannot be deleted: look into its folder 'trash'"
                    )
                if stuck:  # somebody else may be at it
                    self._closed.wait(BUSY_S)
        return count

    def delete_cleared(self) -> int:
        """Room is needed: delete one of the objects that were cleared. Its size; 0: there is
        none."""
        with self._clearing:
            size_bytes = next(self._cleared, 0)
            if not size_bytes and self._layout.has_trash:
                self._cleared = self._layout.empty_trash()
                size_bytes = next(self._cleared, 0)
        if size_bytes:
            self._ledger.remove(size_bytes)
        return size_bytes

    def close(self) -> None:
        self._closed.set()
        self.ask(at_once=True)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._only_one.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # the disk is in trouble: the next scan may do
                self._scan_unless_others_did()
                self._sweep(self._cold.scan_start_ns)
            self.scanned.set()
            self._at_once.wait(MIN_INTERVAL_S)
            self._wanted.wait()
            self._wanted.clear()
            self._at_once.clear()

    def _scan_unless_others_did(self) -> None:
        """Ends when a scan has ended that began after this call."""
        before_ns = self._cold.scan_start_ns
        self._alone(lambda: self._cold.scan_start_ns == before_ns and self._scan(PAUSE_S) > 0)

    def _alone(self, work: Callable[[], bool]) -> bool:
        """What `work` says, once no other thread or process scans. False: the store is closed."""
        while not self._closed.is_set():
            with self._only_one.locked(wait=False) as mine:
                if mine:
                    return work()
            self._closed.wait(BUSY_S)
        return False

    def _scan(self, pause_s: float) -> int:
        """0: nothing may go."""
        self._empty_trash()
        start_ns = self._wall_ns()
        self._cold.begin(start_ns)
        before = self._ledger.total()
        which = self._layout.objects_inode
        found = FoundObjects()
        used = SpaceUsed()
        files = self._layout.scan()
        while piece := list(itertools.islice(files, PIECE_OBJECTS)):
            # What is being written is accounted for, too.
            used = used.plus(SpaceUsed(sum(stat.st_size for _, stat in piece), len(piece)))
            for name, stat in piece:
                if not name.startswith("."):
                    found.add(name, stat.st_mtime_ns)
            if self._closed.wait(pause_s):
                return 0
        if self._layout.objects_inode != which:  # cleared meanwhile, by somebody
            return 0
        self._ledger.correct(before, used)
        return self._cold.replace(found.in_order(start_ns, self._wall_ns()))

    def _empty_trash(self) -> int:
        """Objects deleted of those that were cleared."""
        count = 0
        for size_bytes in self._layout.empty_trash():
            self._ledger.remove(size_bytes)
            count += 1
            if count % PIECE_OBJECTS == 0 and self._closed.wait(PAUSE_S):
                break
        return count
