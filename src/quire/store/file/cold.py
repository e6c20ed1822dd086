"""ColdQueue: the coldest objects of a directory, in the order in which they go. One for all
processes that share it, in a file: what one takes nobody else takes.

    scan_start          bound
    ─────┼────────────────┼──────── time of last use, as the files have it
    every object used before `bound` is in the queue, or was taken from it, or is gone;
    whatever was used since the scan began is not below the bound

A scan writes it, evicting consumes it. Knows names, times and sizes; touching files is left to
whoever takes. A process that dies while it writes leaves an empty queue, and the next scan.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.store.file.shared import SharedFile

NAME_BYTES = 112
"""The longest name of an object: layout.py."""

RECORD = np.dtype([("time_ns", "<i8"), ("name", f"S{NAME_BYTES}")])
Records = npt.NDArray[np.void]

MAX_LOOKS = 64
"""Records looked at while the others wait."""

_HEADER = struct.Struct("<qqqq")


class _Header(NamedTuple):
    scan_start_ns: int = 0
    bound_ns: int = 0
    next: int = 0
    num_records: int = 0


class ColdQueue:
    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._file = SharedFile(path)
        self.is_low = False
        """Less than half of it was left when it was last looked at."""

    @property
    def scan_start_ns(self) -> int:
        """When the latest scan began; 0: never."""
        return self._read(self._file.fd).scan_start_ns

    @property
    def bound_ns(self) -> int:
        return self._read(self._file.fd).bound_ns

    def begin(self, scan_start_ns: int) -> None:
        """A scan begins: whoever uses an object now must make it newer than this."""
        with self._file.locked() as fd:
            self._write(fd, self._read(fd)._replace(scan_start_ns=scan_start_ns))

    def replace(self, records: Records, bound_ns: int) -> None:
        """What a scan found, coldest first."""
        with self._file.locked() as fd:
            header = self._read(fd)._replace(bound_ns=bound_ns, next=0, num_records=0)
            self._write(fd, header)
            os.pwrite(fd, records.view(np.uint8).data, _HEADER.size)
            self._write(fd, header._replace(num_records=len(records)))
            os.ftruncate(fd, _HEADER.size + records.nbytes)
        self.is_low = False

    def take(self, claim: Callable[[str, int], int]) -> int | None:
        """Let the coldest object go: `claim(name, bound)` removes it unless it was used since,
        and returns the bytes that freed. 0: none of those looked at, look again; None: empty.

        In order over all processes: nobody takes the next before this one is gone.
        """
        with self._file.locked() as fd:
            header = self._read(fd)
            self.is_low = 2 * header.next > header.num_records
            for number in range(header.next, min(header.next + MAX_LOOKS, header.num_records)):
                data = os.pread(fd, RECORD.itemsize, _HEADER.size + number * RECORD.itemsize)
                self._write(fd, header._replace(next=number + 1))
                if len(data) != RECORD.itemsize:
                    return None  # torn by a crash of the machine
                name = data[-NAME_BYTES:].rstrip(b"\0").decode(errors="replace")
                if freed := claim(name, header.bound_ns):
                    return freed
            return 0 if header.next + MAX_LOOKS < header.num_records else None

    def close(self) -> None:
        self._file.close()

    def _read(self, fd: int) -> _Header:
        data = os.pread(fd, _HEADER.size, 0)
        return _Header(*_HEADER.unpack(data)) if len(data) == _HEADER.size else _Header()

    def _write(self, fd: int, header: _Header) -> None:
        os.pwrite(fd, _HEADER.pack(*header), 0)


class Coldest:
    """Keeps the coldest of the objects shown to it: about one in eight."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._kept = np.empty(0, RECORD)
        self._more: list[Records] = []
        self._bound_ns = int(np.iinfo(np.int64).max)
        """All that were seen below it are kept."""

    def show(self, objects: list[tuple[str, os.stat_result]]) -> None:
        records = np.zeros(len(objects), RECORD)
        records["time_ns"] = [stat.st_mtime_ns for _, stat in objects]
        records["name"] = [name for name, _ in objects]
        self._num_seen += len(objects)
        self._more.append(records)
        if sum(map(len, self._more)) > max(4096, len(self._kept)):
            self._cut()

    def finish(self, scan_start_ns: int) -> tuple[Records, int]:
        """The coldest, in order, and the bound below which none is missing."""
        self._cut()
        bound_ns = min(self._bound_ns, scan_start_ns)
        cold = self._kept[self._kept["time_ns"] < bound_ns]
        if not len(cold) and len(self._kept):
            # All of one time, or from the future, as when a clock was set back.
            cold, bound_ns = self._kept, int(self._kept["time_ns"].max()) + 1
        return cold[np.argsort(cold["time_ns"], kind="stable")], bound_ns

    def _cut(self) -> None:
        kept = np.concatenate([self._kept, *self._more])
        self._more = []
        wanted = max(self._num_seen // 8, min(16, self._num_seen // 2), 1)
        if len(kept) > wanted:
            order = np.argpartition(kept["time_ns"], wanted)
            self._bound_ns = min(self._bound_ns, int(kept["time_ns"][order[wanted]]))
            kept = kept[order[:wanted]]
        self._kept = kept
