"""ColdQueue: the coldest objects of a directory, in the order in which they go. One for all
processes that share it, in a file: what one takes nobody else takes.

        bound            scan_start
    ──────┼──────────────────┼───── time of last use, as the files have it
    every object used before `bound` is in the queue, or was taken from it, or is gone;
    whatever was used since the scan began is not below it

A scan writes it, evicting consumes it. Knows names, times and sizes; touching files is left to
whoever takes. A process that dies while it writes leaves an empty queue, and the next scan.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.store.file.shared import SharedFile

NAME_BYTES = 112
"""The longest name of an object: layout.py."""

RECORD = np.dtype([("time_ns", "<i8"), ("name", f"S{NAME_BYTES}")])
Records = npt.NDArray[np.void]

PIECE = 1024
"""Records moved at a time."""

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
        """Less than a quarter of it was left when it was last looked at."""

    @property
    def scan_start_ns(self) -> int:
        """When the latest scan began; 0: never."""
        return self._read(self._file.fd).scan_start_ns

    @property
    def bound_ns(self) -> int:
        return self._read(self._file.fd).bound_ns

    @property
    def is_empty(self) -> bool:
        header = self._read(self._file.fd)
        return header.next >= header.num_records

    def begin(self, scan_start_ns: int) -> None:
        """A scan begins: whoever uses an object now must make it newer than this."""
        with self._file.locked() as fd:
            self._write(fd, self._read(fd)._replace(scan_start_ns=scan_start_ns))

    def replace(self, pieces: Sequence[Records], bound_ns: int) -> None:
        """What a scan found, coldest first."""
        with self._file.locked() as fd:
            header = self._read(fd)._replace(bound_ns=bound_ns, next=0, num_records=0)
            self._write(fd, header)
            end = _HEADER.size
            for records in pieces:
                end += os.pwrite(fd, records.view(np.uint8).data, end)
            self._write(fd, header._replace(num_records=sum(map(len, pieces))))
            os.ftruncate(fd, end)
        self.is_low = False

    def take(self, claim: Callable[[str, int], int]) -> int | None:
        """Let the coldest object go: `claim(name, bound)` removes it unless it was used since,
        and returns the bytes that freed. 0: none of those looked at, look again; None: empty.

        In order over all processes: nobody takes the next before this one is gone.
        """
        with self._file.locked() as fd:
            header = self._read(fd)
            self.is_low = 4 * header.next > 3 * header.num_records
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
    """Keeps the coldest of the objects shown to it: about one in eight.

    In pieces throughout: numpy holds the interpreter while it moves records, and a million of them
    at once would hold up every other thread.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._pieces: list[Records] = []
        self._bound_ns = int(np.iinfo(np.int64).max)
        """All that were seen below it are kept."""

    def show(self, objects: list[tuple[str, os.stat_result]]) -> None:
        """A piece of them: not more than a thousand or so."""
        records = np.zeros(len(objects), RECORD)
        records["time_ns"] = [stat.st_mtime_ns for _, stat in objects]
        records["name"] = [name for name, _ in objects]
        self._num_seen += len(objects)
        self._pieces.append(records[records["time_ns"] < self._bound_ns])
        if sum(map(len, self._pieces)) > max(4096, 2 * self._num_wanted):
            self._cut()

    def finish(self, scan_start_ns: int) -> tuple[list[Records], int]:
        """The coldest, in order, in pieces, and the bound below which none is missing."""
        self._cut()
        bound_ns = min(self._bound_ns, scan_start_ns)
        times_ns = self._times_ns()
        num_below = int((times_ns < bound_ns).sum())
        if not num_below:
            # All of one time, or from the future, as when a clock was set back.
            num_below = len(times_ns)
        order = np.argsort(times_ns, kind="stable")[:num_below]
        kept = np.empty(len(times_ns), RECORD)
        first = 0
        for piece in self._pieces:
            kept[first : first + len(piece)] = piece
            first += len(piece)
        last_ns = int(times_ns[order[-1]]) if num_below else 0
        return [kept[order[i : i + PIECE]] for i in range(0, num_below, PIECE)], last_ns + 1

    @property
    def _num_wanted(self) -> int:
        return max(self._num_seen // 8, min(16, self._num_seen // 2), 1)

    def _times_ns(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.empty(0, "<i8"), *(piece["time_ns"] for piece in self._pieces)])

    def _cut(self) -> None:
        times_ns = self._times_ns()
        wanted = self._num_wanted
        if len(times_ns) <= wanted:
            return
        cut_ns = int(np.partition(times_ns, wanted)[wanted])
        if times_ns.min() < cut_ns:
            self._pieces = [piece[piece["time_ns"] < cut_ns] for piece in self._pieces]
        else:  # all that matter are of one time: any of them
            self._pieces = [piece[piece["time_ns"] == cut_ns][:wanted] for piece in self._pieces]
            self._pieces = self._pieces[: wanted + 1]
        self._bound_ns = cut_ns
