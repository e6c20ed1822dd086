"""The admin key of a server that was given none: made at its start, in a file for its user alone.

    quire serve ──writes──▶ <cache directory>/admin/<port>, mode 0600 ◀──reads── routers, people

The file is there while the server is: a key is good for one life of one server, which holds a lock
on it for as long. What a server that was killed left behind, nobody holds: the next one to start
removes it. Knows files and ports, nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from quire.errors import ConfigError
from quire.models.cache import cache_dir
from quire.web.addresses import is_loopback

_MAX_BYTES = 4096
_LOOK_S = 0.2
_NAME = re.compile(r"(\d+)(\.[0-9a-f]{8})?")
"""A port, and the draft of such a file."""


def make_key() -> str:
    return secrets.token_urlsafe(32)


def place_of(url: str) -> Path:
    """Where the key of a server on this machine is, unless its file was named."""
    return cache_dir() / "admin" / str(urlsplit(url).port or 80)


@contextlib.contextmanager
def kept(key: str, file: Path) -> Iterator[None]:
    """The key is in the file, which nobody else can read, until the end. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_stale()
    draft = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    # Made anew, never opened: what lies there may be somebody else's, or a link.
    number = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "w", encoding="ascii") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX)  # goes with the process, however that ends
            held.write(f"{key}\n")
            held.flush()
            draft.replace(file)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        try:
            yield
        finally:
            with contextlib.suppress(OSError, ConfigError):
                if read_key(file) == key:  # else a later server's
                    file.unlink()


def remove_stale() -> None:
    """Keys in the place for them, of servers that are gone without having removed theirs."""
    folder = cache_dir() / "admin"
    for file in folder.iterdir() if folder.is_dir() else ():
        named = _NAME.fullmatch(file.name)
        if named is None or file.is_symlink() or _is_served(int(named[1])):
            continue
        with contextlib.suppress(OSError), file.open("rb") as reading:
            fcntl.flock(reading, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while it is held
            file.unlink()


def _is_served(port: int) -> bool:
    """Does anybody listen there? For servers that hold no lock."""
    with contextlib.suppress(OSError, OverflowError):
        socket.create_connection(("127.0.0.1", port), timeout=_LOOK_S).close()
        return True
    return False


def read_key(file: Path) -> str:
    """Raises ConfigError."""
    try:
        with file.open("rb") as reading:
            key = reading.read(_MAX_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the admin key cannot be read from {str(file)!r}: {error}") from error
    if not key or not key.isprintable():
        raise ConfigError(f"{file} should hold the admin key: one line of printable ASCII")
    return key


def find_key(url: str, file: Path | None = None) -> str | None:
    """The key of a server: in a file that was named, or in its place if the server is on this
    machine; None: there is none to be found."""
    host = urlsplit(url).hostname or ""
    if file is None and host != "localhost" and not is_loopback(host):
        return None
    with contextlib.suppress(ConfigError):
        return read_key(file or place_of(url))
    return None
