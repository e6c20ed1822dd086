"""The order of use of a file store: the files' own times, so that it is the same for all
processes, and survives them. Knows paths and times; nothing of budgets.

**The law of the path**: a page is never newer than the page that it needs. Whoever uses a run of
pages renews its head first and gives each page a time a little before the one ahead of it:

    page    0        1        2        3
    time    t        t-1      t-2      t-3      (in steps)

so that the coldest of all objects is always the end of some path. A run ends at a hole: what lies
behind cannot be used, and may grow cold. A run that begins in the middle of a path is not made
newer than the page before it, whose key each file carries as an attribute (where the file system
has those; elsewhere the law holds for runs from the first page on). A page that is written behind
a page nobody used for long renews the whole path to it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from quire.store.base import STEP_NS, ObjectName
from quire.store.file.cold import KEY_DIGITS

SLACK = 16
"""A time counts as now while it is younger than a sixteenth of the time since the last scan began:
what is used all the time is not renewed all the time."""

_PARENT = "user.quire"
"""Short, and the key as bytes: it fits into the inode."""


def renew(paths: Sequence[str], used_ns: int, scan_start_ns: int, *, each: bool) -> None:
    """The objects at `paths` were used at `used_ns`. A run of a path, in order, of which only what
    lies before the first missing one counts; with `each`, objects that do not need each other."""
    parent = None if each or not paths else _parent_of(paths[0])
    if parent:
        parent_ns = time_of(parent)
        if parent_ns is None:
            return
        used_ns = min(used_ns, parent_ns - STEP_NS)
    stale_ns = used_ns - max(0, used_ns - scan_start_ns) // SLACK
    present: list[tuple[str, int]] = []
    for path in paths:
        time_ns = time_of(path)
        if time_ns is not None:
            present.append((path, time_ns))
        elif not each:
            break
    wanted = [time_ns for _, time_ns in present]
    floor_ns = 0
    for i in reversed(range(len(wanted))):
        if wanted[i] < stale_ns:
            wanted[i] = max(wanted[i], used_ns - i * STEP_NS)
        wanted[i] = max(wanted[i], floor_ns)
        floor_ns = 0 if each else wanted[i] + STEP_NS
    for (path, time_ns), wanted_ns in zip(present, wanted, strict=True):
        if wanted_ns > time_ns:
            set_time(path, wanted_ns)


def renew_path_to(path: str, used_ns: int, scan_start_ns: int) -> int | None:
    """The object at `path` and all that it needs count as used, unless that was since the scan
    began, which may have seen them: they are not to go before what is written behind them now.
    Returns its time; None: it is not there, or lacks something, or it is not known what it needs.
    """
    old: list[str] = []
    at: str | None = path
    before_ns = None
    while at:
        time_ns = time_of(at)
        if time_ns is None:
            return None
        if time_ns >= scan_start_ns:
            before_ns = time_ns
            break
        old.append(at)
        at = _parent_of(at)
    if at is None:
        return None
    if before_ns is None:
        before_ns = max(used_ns, scan_start_ns + len(old) * STEP_NS) + STEP_NS
    for needed in reversed(old):
        before_ns -= STEP_NS
        set_time(needed, before_ns)
    return before_ns


def time_of(path: str) -> int | None:
    """When the object was last used; None: it is not there."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def set_time(file: str | int, time_ns: int) -> None:
    with contextlib.suppress(OSError):  # gone, or another user's file: its owner keeps the time
        os.utime(file, ns=(time_ns, time_ns))


def set_parent(fd: int, parent: ObjectName | None) -> None:
    """The object needs that one, or none: a file that had another object before has its parent
    still."""
    with contextlib.suppress(OSError):
        os.setxattr(fd, _PARENT, parent.key if parent else b"")


def _parent_of(path: str) -> str | None:
    """Where the object is that this one needs; empty: it needs none; None: that is not known."""
    try:
        key = os.getxattr(path, _PARENT)
    except OSError:
        return None
    folder, _, text = path.rpartition("/")
    root = folder.rpartition("/")[0]
    return f"{root}/{key.hex()[:2]}/{key.hex()}{text[KEY_DIGITS:]}" if key else ""
