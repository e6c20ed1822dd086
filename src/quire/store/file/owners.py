"""Owners: who has how much of a directory, so that one who has its share of the budget makes room
among its own.

    state/owners/<name>   bytes named │ size, object │ size, object │ …

A list for each owner, of what was written for it, in a file that all processes append to. What it
names may be gone, and what a process wrote as it died it may lack; it is looked through when its
bytes come to the owner's share: what is gone is struck off, and of the rest the coldest go, some at
a time, since looking costs as much as the owner has. Objects without an owner are in no list.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from quire.store.base import OBJECT_TEXT, SPARE_SHARE
from quire.store.file.shared_file import SharedFile
from quire.store.file.uses import time_of
from quire.types import Owner

_TOTAL = struct.Struct("<q")
_RECORD = struct.Struct("<q116s")
"""Names are no longer: see layout.py."""


class _Owned(NamedTuple):
    time_ns: int
    size_bytes: int
    text: str


class Owners:
    def __init__(
        self,
        folder: str,
        max_bytes: int,
        *,
        path_of: Callable[[str], str],
        remove: Callable[[str, int], int],
    ) -> None:
        """`max_bytes`: the budget that shares are of. `remove(name, bound)`: delete an object
        unless it was used at `bound` or later; gives its size, or 0. Raises OSError."""
        os.makedirs(folder, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._path_of = path_of
        self._remove = remove

    def room(self, owner: Owner, size_bytes: int, bound_ns: int) -> int:
        """How many of these bytes the owner may have more; as far as need be, what it used longest
        ago goes, if that was before `bound_ns`. Raises OSError."""
        most = int(self._max_bytes * owner.share)
        with self._list_of(owner) as file:
            total = _total(file.fd)
            if total + size_bytes > most:
                kept = self._make_room(file.fd, most, size_bytes, bound_ns)
                _write(file.fd, kept)
                total = sum(each.size_bytes for each in kept)
        return max(0, min(size_bytes, most - total))

    def wrote(self, owner: Owner, objects: Sequence[tuple[str, int]]) -> None:
        """These were published, each of so many bytes. Raises OSError."""
        records = b"".join(_RECORD.pack(size, text.encode()) for text, size in objects)
        with self._list_of(owner) as file:
            total = _total(file.fd)
            end = max(_TOTAL.size, os.fstat(file.fd).st_size)
            os.pwrite(file.fd, records, end - (end - _TOTAL.size) % _RECORD.size)
            os.pwrite(file.fd, _TOTAL.pack(total + sum(size for _, size in objects)), 0)

    def sweep(self, before_ns: int) -> None:
        """Strike off what is gone, of those for whom nothing was written since then; lists that
        name nothing go. Raises OSError."""
        for name in os.listdir(self._folder):
            if os.stat(f"{self._folder}/{name}").st_mtime_ns >= before_ns:
                continue
            with self._list_of(Owner(name, 0.0)) as file:
                kept = list(self._there(file.fd))
                _write(file.fd, kept)
                if not kept:
                    os.unlink(f"{self._folder}/{name}")

    @contextmanager
    def _list_of(self, owner: Owner) -> Iterator[SharedFile]:
        """Nobody else has it meanwhile. Raises OSError."""
        path = f"{self._folder}/{owner.name}"
        try:
            file = SharedFile(path)
        except FileNotFoundError:  # somebody has emptied the directory
            # Not what it is in, which would be no store without its marker: Layout.restore().
            with suppress(FileExistsError):
                os.mkdir(self._folder)
            file = SharedFile(path)
        try:
            with file.locked():
                yield file
        finally:
            file.close()

    def _make_room(self, fd: int, most: int, size_bytes: int, bound_ns: int) -> list[_Owned]:
        """Returns what is left."""
        there = sorted(self._there(fd))
        excess = sum(each.size_bytes for each in there) + size_bytes - most
        if excess <= 0:
            return there
        kept: list[_Owned] = []
        excess += most // SPARE_SHARE
        for each in there:
            # What was used meanwhile stays, and so does what it needs, which was used with it.
            is_cold = excess > 0 and each.time_ns < bound_ns
            freed = self._remove(each.text, each.time_ns + 1) if is_cold else 0
            excess -= freed
            if not freed:
                kept.append(each)
        return kept

    def _there(self, fd: int) -> Iterator[_Owned]:
        data = os.pread(fd, os.fstat(fd).st_size, _TOTAL.size)
        whole = data[: len(data) // _RECORD.size * _RECORD.size]  # the rest was torn by a crash
        found = {text: size for size, text in _RECORD.iter_unpack(whole)}
        for name, size_bytes in found.items():
            text = name.rstrip(b"\0").decode(errors="replace")
            if not OBJECT_TEXT.fullmatch(text):
                continue  # not ours, or damaged: no path is made of it
            time_ns = time_of(self._path_of(text))
            if time_ns is not None:
                yield _Owned(time_ns, size_bytes, text)


def _total(fd: int) -> int:
    data = os.pread(fd, _TOTAL.size, 0)
    return int(_TOTAL.unpack(data)[0]) if len(data) == _TOTAL.size else 0


def _write(fd: int, owned: Sequence[_Owned]) -> None:
    records = [_RECORD.pack(each.size_bytes, each.text.encode()) for each in owned]
    data = _TOTAL.pack(sum(each.size_bytes for each in owned)) + b"".join(records)
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))
