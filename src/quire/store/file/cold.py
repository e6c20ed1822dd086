"""ColdQueue: the objects of a directory in the order in which they go, coldest first. One for all
processes that share it, in a file: what one takes nobody else takes.

        next          bound      scan_start
    ──────┼─────────────┼──────────────┼───── time of last use, as the files have it
    every object used before `bound` is in the queue behind `next`, or was taken from it, or is
    gone; whatever was used since the scan began is not below it

A scan writes it, evicting consumes it. Knows names, times and sizes; touching files is left to
whoever takes. A process that dies while it writes leaves an empty queue, and the next scan.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.store.file.shared_file import SharedFile
from quire.types import PAGE_KEY_BYTES

KEY_DIGITS = 2 * PAGE_KEY_BYTES
SUFFIX_BYTES = 48
"""The longest rest of an object's name, behind its key: layout.py."""

RECORD = np.dtype([("time_ns", "<i8"), ("key", "V32"), ("suffix", f"S{SUFFIX_BYTES}")])
Records = npt.NDArray[np.void]
_RECORD = struct.Struct(f"<q32s{SUFFIX_BYTES}s")
_HEADER = struct.Struct("<qqqq")

PIECE = 1024
"""Records moved at a time: numpy holds the interpreter while it moves them, and a million at once
would hold up every other thread."""

FUTURE_NS = 10**9
"""What was used so much later than now was used by a clock that has been set back since."""

MAX_LOOKS = 64
"""Records looked at while the other processes wait."""


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
        return self._read().scan_start_ns

    @property
    def bound_ns(self) -> int:
        return self._read().bound_ns

    @property
    def is_empty(self) -> bool:
        header = self._read()
        return header.next >= header.num_records

    def begin(self, scan_start_ns: int) -> None:
        """A scan begins: whoever uses an object now must make it newer than this."""
        with self._file.locked():
            self._write(self._read()._replace(scan_start_ns=scan_start_ns))

    def replace(self, pieces: Iterable[Records]) -> int:
        """What a scan found, coldest first. Returns how many these are."""
        with self._file.locked():
            header = self._read()._replace(bound_ns=0, next=0, num_records=0)
            self._write(header)
            end, bound_ns = _HEADER.size, 0
            for records in pieces:
                end += os.pwrite(self._file.fd, records.view(np.uint8).data, end)
                bound_ns = int(records["time_ns"][-1]) + 1
            num_records = (end - _HEADER.size) // _RECORD.size
            self._write(header._replace(bound_ns=bound_ns, num_records=num_records))
            os.ftruncate(self._file.fd, end)
        self.is_low = False
        return num_records

    def take(self, count: int, claim: Callable[[str, int], bool]) -> int:
        """Let the `count` coldest objects go: `claim(name, bound)` removes one unless it was used
        since, and says whether it did. How many went, after a bounded look.

        In order over all processes: nobody takes the next before these are gone.
        """
        with self._file.locked():
            header = self._read()
            at, end = header.next, header.num_records
            if at >= end:
                return 0
            first = _HEADER.size + at * _RECORD.size
            data = os.pread(self._file.fd, min(MAX_LOOKS, end - at) * _RECORD.size, first)
            # A shorter piece than asked for was torn by a crash of the machine.
            whole = data[: len(data) // _RECORD.size * _RECORD.size]
            num_gone = 0
            for _, key, suffix in _RECORD.iter_unpack(whole):
                if num_gone == count:
                    break
                at += 1
                name = key.hex() + suffix.rstrip(b"\0").decode(errors="replace")
                num_gone += claim(name, header.bound_ns)
            self._write(header._replace(next=at if whole else end))
            self.is_low = 4 * at > 3 * end
        return num_gone

    def close(self) -> None:
        self._file.close()

    def _read(self) -> _Header:
        data = os.pread(self._file.fd, _HEADER.size, 0)
        return _Header(*_HEADER.unpack(data)) if len(data) == _HEADER.size else _Header()

    def _write(self, header: _Header) -> None:
        os.pwrite(self._file.fd, _HEADER.pack(*header), 0)


class FoundObjects:
    """The objects that a scan has found: some fifty bytes of each."""

    def __init__(self) -> None:
        self._times_ns = array("q")
        self._keys = bytearray()
        self._kinds = array("H")
        self._suffixes: dict[str, int] = {}
        """What names have behind their keys is much the same for all: by number."""

    def add(self, name: str, time_ns: int) -> None:
        self._times_ns.append(time_ns)
        self._keys += bytes.fromhex(name[:KEY_DIGITS])
        self._kinds.append(self._suffixes.setdefault(name[KEY_DIGITS:], len(self._suffixes)))

    def in_order(self, scan_start_ns: int, now_ns: int) -> Iterator[Records]:
        """Those not used since the scan began, coldest first, in pieces."""
        times_ns = np.frombuffer(self._times_ns, np.int64)
        keys = np.frombuffer(self._keys, "V32")
        kinds = np.frombuffer(self._kinds, np.uint16)
        suffixes = np.array(list(self._suffixes), f"S{SUFFIX_BYTES}")
        order = np.argsort(times_ns, kind="stable")
        if len(order) and times_ns[order[0]] < now_ns + FUTURE_NS:  # else a clock was set back
            order = order[: int((times_ns < scan_start_ns).sum())]
        for first in range(0, len(order), PIECE):
            some = order[first : first + PIECE]
            records = np.empty(len(some), RECORD)
            records["time_ns"] = times_ns[some]
            records["key"] = keys[some]
            records["suffix"] = suffixes[kinds[some]]
            yield records
