"""Where models made here are kept, and how a directory appears there whole or not at all.

    models/.NAME.lock        held by the one process that builds or cleans up NAME
    models/.NAME.PID.part    being built (or .NAME.PID.*.part, what it is built from); what a killed
                             process left is removed by the next
    models/NAME              complete: renamed there after every byte was synced

Knows directories and locks; nothing of what is built in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.errors import ModelError
from quire.progress import Share

_LOCK_POLL_S = 0.2


def no_progress(what: str, done: float) -> None:
    """For callers who do not care."""


def cache_dir() -> Path:
    """The user's cache directory: QUIRE_CACHE_DIR, else quire under the XDG cache directory."""
    if own := os.environ.get("QUIRE_CACHE_DIR"):
        return Path(own)
    # The XDG specification says to ignore a relative path.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "quire"


def build_once(target: Path, build: Callable[[Path], None], progress: Share) -> Path:
    """`target`, built by the first who asks for it: `build` fills the empty directory it is given.

    Others wait meanwhile. Whatever `build` raises is passed on, and nothing is left behind.
    Raises ModelError when the cache directory cannot be written.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), progress):
            if not target.is_dir():
                _build(target, build)
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written ({error.strerror or error}): make room there, or set "
            "QUIRE_CACHE_DIR to a directory that can be written"
        ) from error
    return target


def _build(target: Path, build: Callable[[Path], None]) -> None:
    leftover = re.compile(rf"\.{re.escape(target.name)}\.\d+(\.\w+)?\.part")
    for path in target.parent.iterdir():
        if leftover.fullmatch(path.name):
            shutil.rmtree(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        build(part)
        _sync(part)
        os.rename(part, target)
        _sync_one(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, progress: Share) -> Iterator[None]:
    # The file stays: removing it would let two processes hold locks on two files of one name.
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another process that converts this model", 0.0)
                time.sleep(_LOCK_POLL_S)
        yield


def _sync(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync_one(path)
    _sync_one(directory)


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
