"""Where a file store keeps things, what is its own, and who is writing. No pages, no budget.

    root/
      quire-store.json              marker with the format version
      objects/ab/<key hex>.<component>.<shard>of<shards>      published objects, by first key byte
      objects/ab/.<writer>.<generation>.<n>.tmp               being written by that writer
      quarantine/<object name>      objects that failed verification, for a person to look at
      trash/<token>.objects/ab/…    what was cleared, until it is deleted; <token>.quarantine
      state/<writer>.lock           held (flock) by one open store for as long as it lives;
                                    counts its holders: the generation
      state/used_bytes              what all openers together account for
      state/coldest, state/scan     what goes next; held by whoever scans
      state/owners/<owner>          what was written for whom, where quotas are kept

Whatever is not named like this is foreign and never touched. A writer that died has lost its
lock with its process, on any host, so its temporary files can be told from a live writer's
without trusting process ids or clocks. An opened store is not to be used across fork().

Somebody may remove all of it while it is open (`rm -rf root/*`). Objects are then misses; whoever
writes next makes the rest anew (`restore`), and takes a writer number there; but not where a disk
was that is not mounted any more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import struct
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from quire.errors import StoreError
from quire.store.base import OBJECT_TEXT

LAYOUT_VERSION = 1
MARKER = "quire-store.json"
MAX_WRITERS = 4096
NUM_SHARDS = 256
FOLDERS = ("objects", "quarantine", "trash", "state")

_SHARD = re.compile("[0-9a-f]{2}")
_TEMPORARY = re.compile(r"\.(\d{1,4})\.(\d+)\.\d+\.tmp")


def unusable(root: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot use {str(root)!r} as a store ({error.strerror}): "
        f"make it writable for this user or give another directory"
    )


class _Writer(NamedTuple):
    number: int
    generation: int
    lock_fd: int
    lock: os.stat_result


class Layout:
    """An opened store directory, with a writer number of its own until `close()`."""

    def __init__(self, root: Path, *, must_exist: bool) -> None:
        """Raises StoreError: one sentence with the fix."""
        self.root = root
        self._marker = f"{root}/{MARKER}"
        self._objects = f"{root}/objects"
        self._quarantine = f"{root}/quarantine"
        self._trash = f"{root}/trash"
        self._state = f"{root}/state"
        self.usage_path = f"{self._state}/used_bytes"
        self.cold_path = f"{self._state}/coldest"
        self.scan_path = f"{self._state}/scan"
        self.owners_path = f"{self._state}/owners"
        self._restoring = threading.Lock()
        self._is_closed = False
        try:
            _claim(root, must_exist=must_exist)
            self.make_folders()
            self._writer = self._take_number()
            self._device = os.stat(root).st_dev
        except OSError as error:
            raise unusable(root, error) from error
        self.scratch_path = f"{self._state}/{self._writer.number}.scratch"

    def restore(self) -> bool:
        """Make anew what somebody has removed behind our back. False: nothing was. Raises OSError,
        StoreError."""
        if self._is_whole():
            return False
        with self._restoring:
            if self._is_closed:
                raise OSError(errno.EBADF, "the store is closed")
            if not os.path.exists(self._marker):
                self._check_disk()
            _claim(self.root, must_exist=False, ours=FOLDERS)
            self.make_folders()
            if not self._is_whole():
                gone, self._writer = self._writer, self._take_number()
                os.close(gone.lock_fd)
        return True

    def look(self) -> None:
        """Raises OSError: what is there cannot be seen. An empty directory can."""
        with contextlib.suppress(FileNotFoundError):
            os.stat(self._marker)

    def _check_disk(self) -> None:
        """An empty directory may also be where a disk was mounted. Raises OSError, StoreError."""
        place = self.root if self.root.exists() else self.root.parent
        if os.stat(place).st_dev != self._device:
            raise StoreError(
                f"the disk of {str(self.root)!r} is not mounted any more: mount it again, or "
                "attach the store anew"
            )

    def _is_whole(self) -> bool:
        """Marker and lock are here for as long as the store is: who empties it takes both."""
        writer = self._writer
        try:
            os.stat(self._marker)
            return os.path.samestat(os.stat(self._lock_path(writer.number)), writer.lock)
        except FileNotFoundError:
            return False

    @property
    def objects_inode(self) -> int:
        """Changes when the store is cleared, by whomever."""
        return os.stat(self._objects).st_ino

    def object_path(self, text: str) -> str:
        return f"{self._objects}/{text[:2]}/{text}"

    def quarantine_path(self, text: str) -> str:
        return f"{self._quarantine}/{text}"

    def temporary_path(self, text: str, number: int) -> str:
        """In the directory of the object itself: the file system allocates a file's inode and
        blocks near its directory, so writers of different shards stay out of each other's way."""
        writer = self._writer
        folder = f"{self._objects}/{text[:2]}"
        return f"{folder}/.{writer.number}.{writer.generation}.{number}.tmp"

    def make_folders(self) -> None:
        """Those that are missing: at the first opening, and after a clearing. Not in a directory
        that was emptied, where the marker comes first: restore(). Raises OSError."""
        os.stat(self._marker)
        for name in FOLDERS:
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{self.root}/{name}")
        _spread_subdirectories(self._objects)
        for shard in range(NUM_SHARDS):
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{self._objects}/{shard:02x}")

    def discard(self) -> None:
        """Everything is gone at once, for all processes; its files wait in the trash. Whoever
        comes before the new folders are made finds nothing, or makes them. Raises OSError."""
        self.make_folders()
        token = secrets.token_hex(8)
        for folder in (self._objects, self._quarantine):
            with contextlib.suppress(FileNotFoundError):  # somebody else is clearing
                os.rename(folder, f"{self._trash}/{token}.{os.path.basename(folder)}")
        self.make_folders()

    def set_aside(self, text: str) -> None:
        """An object, into quarantine. Raises FileNotFoundError if it is not there, OSError."""
        with contextlib.suppress(FileExistsError):  # somebody may have removed it
            os.mkdir(self._quarantine)
        os.rename(self.object_path(text), self.quarantine_path(text))

    @property
    def has_trash(self) -> bool:
        return bool(self._discarded())

    def _discarded(self) -> list[str]:
        try:
            return os.listdir(self._trash)
        except FileNotFoundError:  # it was removed, and nothing was cleared since
            return []

    def empty_trash(self) -> Iterator[int]:
        """Delete what was discarded, by whomever; gives the size of each object as it goes.
        Several may be at it. Foreign files go back to where they were, with their folders."""
        for top in self._discarded():
            counts = top.endswith(".objects")
            home = self._objects if counts else self._quarantine
            for folder, folders, names in os.walk(f"{self._trash}/{top}", topdown=False):
                links = [name for name in folders if os.path.islink(f"{folder}/{name}")]
                for name in names + links:
                    path = f"{folder}/{name}"
                    with contextlib.suppress(OSError):  # somebody else was faster
                        if not OBJECT_TEXT.fullmatch(name) and not _TEMPORARY.fullmatch(name):
                            place = os.path.relpath(folder, f"{self._trash}/{top}")
                            os.makedirs(os.path.join(home, place), exist_ok=True)
                            os.rename(path, os.path.join(home, place, name))
                            continue
                        size_bytes = os.lstat(path).st_size
                        os.unlink(path)
                        if counts and not name.startswith("."):
                            yield size_bytes
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def scan(self) -> Iterator[tuple[str, os.stat_result]]:
        """All objects, and the temporary files of living writers; removes those of dead ones."""
        for shard in range(NUM_SHARDS):
            yield from self._scan(f"{self._objects}/{shard:02x}", clean=True)

    def scan_quarantine(self) -> Iterator[tuple[str, os.stat_result]]:
        yield from self._scan(self._quarantine, clean=False)

    def close(self) -> None:
        """Give the writer number back. Once."""
        with self._restoring:
            self._is_closed = True
            os.close(self._writer.lock_fd)

    def _scan(self, folder: str, *, clean: bool) -> Iterator[tuple[str, os.stat_result]]:
        try:
            entries = os.scandir(folder)
        except OSError:  # a missing or unreadable directory holds no object we could serve
            return
        with entries:
            for entry in entries:
                try:
                    if OBJECT_TEXT.fullmatch(entry.name) or (
                        clean and self._is_being_written(entry)
                    ):
                        # Not entry.stat(), which holds up all threads while the disk is read.
                        yield entry.name, os.stat(entry.path, follow_symlinks=False)
                except OSError:  # removed by another process meanwhile; or else tried again
                    continue

    def _is_being_written(self, entry: os.DirEntry[str]) -> bool:
        """By a living writer; what a dead one left is removed. Holding the writer's lock while
        doing so keeps a new one from starting under the same number."""
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None:
            return False
        writer, generation = int(match[1]), int(match[2])
        own = self._writer
        if writer == own.number:  # of an earlier holder, dead since we hold it; or ours
            if generation != own.generation:
                os.unlink(entry.path)
            return generation == own.generation
        fd = self._try_lock(writer)
        if fd is not None:
            try:
                os.unlink(entry.path)
            finally:
                os.close(fd)
        return fd is None

    def _take_number(self) -> _Writer:
        for number in range(MAX_WRITERS):
            fd = self._try_lock(number)
            if fd is not None:
                return _Writer(number, _count_up(fd), fd, os.fstat(fd))
        raise OSError(errno.EMFILE, f"{MAX_WRITERS} stores are open on it already")

    def _lock_path(self, writer: int) -> str:
        return f"{self._state}/{writer}.lock"

    def _try_lock(self, writer: int) -> int | None:
        fd = os.open(self._lock_path(writer), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return fd


def _claim(root: Path, *, must_exist: bool, ours: Collection[str] = ()) -> None:
    """Make sure that `root` is a store of our format; turn a new or empty directory into one, or
    one in which nothing is but what is `ours`."""
    marker = root / MARKER
    for place in (root, root.parent):
        if place.exists() and not place.is_dir():
            raise StoreError(f"{str(place)!r} is a file, not a directory: give a directory")
    if not marker.exists():
        if must_exist:
            raise StoreError(
                f"there is no store at {str(root)!r}: check the path; "
                f"a store is created when a cache first opens it"
            )
        if not root.parent.is_dir():
            raise StoreError(
                f"the directory {str(root.parent)!r} does not exist: create it or correct the path"
            )
        root.mkdir(exist_ok=True)
        # A second opener may be at this very point: its unfinished marker is not foreign.
        known = {"lost+found", *ours}
        foreign = [n for n in os.listdir(root) if n not in known and not n.startswith(MARKER)]
        if foreign and not marker.exists() and not _is_left_over(root, foreign):
            raise StoreError(
                f"{str(root)!r} is not empty and not a Quire store: give an empty or new "
                f"directory, such as {str(root / 'quire')!r}"
            )
        # A name of its own: ranks of one process, or of two hosts, may create it together.
        draft = root / f"{MARKER}.{secrets.token_hex(8)}"
        draft.write_text(json.dumps({"quire_store": LAYOUT_VERSION}) + "\n")
        draft.replace(marker)
    _check_marker(root, marker)


def _is_left_over(root: Path, names: Collection[str]) -> bool:
    """Of a store that somebody emptied while others wrote, who made folders anew before the marker
    went, too. In another's folder of such a name are other things."""
    try:
        inside = os.listdir(root / "objects")
    except FileNotFoundError:
        inside = []
    return set(names) <= set(FOLDERS) and all(map(_SHARD.fullmatch, inside))


def _check_marker(root: Path, marker: Path) -> None:
    try:
        version = json.loads(marker.read_text()).get("quire_store")
    except (ValueError, AttributeError):
        version = None
    if version != LAYOUT_VERSION:
        raise StoreError(
            f"{str(root)!r} holds a store of format {version}, this Quire reads format "
            f"{LAYOUT_VERSION}: give another directory, or use the Quire that wrote it"
        )


def _count_up(fd: int) -> int:
    """A new file begins anywhere: a holder of one that was removed may still be writing."""
    text = os.pread(fd, 20, 0).decode(errors="replace").strip()
    generation = int(text) + 1 if text.isdecimal() else secrets.randbits(48)
    os.pwrite(fd, f"{generation}\n".encode(), 0)
    return generation


def _spread_subdirectories(path: str) -> None:
    """Ask ext4 to place the shard directories in different block groups, where it can.

    ext4 allocates inodes near their directory, and without a journal it steps over every inode
    freed there in the last minutes, one by one. With all shards in one group, creating a file
    after many deletions (that is, at the budget) was measured to cost 500 µs; spread out, 15 µs.
    """
    get_flags, set_flags, topdir = 0x80086601, 0x40086602, 0x00020000
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # not ext4: nothing to ask for
            flags = bytearray(8)
            fcntl.ioctl(fd, get_flags, flags)
            (value,) = struct.unpack("@q", flags)
            if not value & topdir:
                fcntl.ioctl(fd, set_flags, struct.pack("@q", value | topdir))
    finally:
        os.close(fd)
