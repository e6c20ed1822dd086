"""Places: stores on servers that can be harmed, and how the harm is undone.

Servers are real processes (S3: a test double); the wire to them is a relay of ours. A process's own
memory (`memory://`) has nobody who could harm it, and is not here.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire.store import open_store
from quire.store.base import HEADER_BYTES, Blob, NewObject, ObjectName
from quire.types import PageKey, PageStatus
from store_servers import FarLink, Link, Mooncake, Moto, Valkey

DELAY_S, RATE = 0.3, 4 << 20
OTHERS = "others"

Act = Callable[[], object]


class Fault(NamedTuple):
    harm: Act
    undo: Act
    is_silence: bool = False
    """Nobody answers, at once: the breaker must open."""


class Place:
    """One store. `faults`: what can be done to it, by name."""

    url: str
    faults: dict[str, Fault]

    def close(self) -> None: ...

    def damage(self) -> None:
        damage(self.url)


def damage(url: str) -> int:
    """One byte of every page, by somebody else's hand. Returns of how many."""
    return rewrite(url, lambda blob: _flipped(blob, blob.payload))


def break_headers(url: str) -> int:
    return rewrite(url, lambda blob: _flipped(blob, blob.header))


def cut_short(url: str) -> int:
    """Of every page only the first half is there."""
    return rewrite(url, lambda blob: blob._replace(payload=blob.payload[: len(blob.payload) // 2]))


def rewrite(url: str, change: Callable[[Blob], Blob]) -> int:
    """Every object, by somebody else's hand. Returns how many. What is no value has no bytes."""
    count = 0
    with closing(open_store(url)) as store:
        for item in [item for item in store.scan() if item.size_bytes]:
            blob = _blob(item.size_bytes - HEADER_BYTES)
            if store.get([item.name], [blob], deadline=_soon()) == [PageStatus.OK]:
                store.quarantine(item.name)
                new = NewObject(item.name, change(blob), None, time.time_ns())
                count += store.put([new], deadline=_soon()) == [PageStatus.OK]
    return count


def lose(url: str, *keys: PageKey) -> int:
    """These pages, all of them if none is named. Returns how many objects."""
    with closing(open_store(url)) as store:
        names = [item.name for item in store.scan() if not keys or item.name.key in keys]
        return sum(store.quarantine(name) for name in names)


def fill(url: str) -> int:
    """With another's pages, until none is taken any more. Returns how many were."""
    with closing(open_store(f"{url}&prefix={OTHERS}:")) as store:
        for number in range(512):
            name = ObjectName(PageKey(number.to_bytes(4, "big") * 8), "full", 0, 1)
            new = NewObject(name, _blob(1 << 20), None, time.time_ns())
            if store.put([new], deadline=_soon()) != [PageStatus.OK]:
                break
    return number


def empty(url: str) -> int:
    """Of what `fill` has put there."""
    with closing(open_store(f"{url}&prefix={OTHERS}:")) as store:
        return store.clear()


_HAND = """
import sys
sys.path.insert(0, sys.argv[1])
from e2e.stores import places
for line in sys.stdin:
    name, url = line.split()
    print(getattr(places, name)(url), flush=True)
"""


class Hand:
    """Somebody else's, in a process of its own: what its client takes and keeps is not counted as
    taken by the process that is looked at."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HAND, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def does(self, act: Callable[[str], int], url: str) -> Act:
        def do() -> None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(f"{act.__name__} {url}\n")
            self._process.stdin.flush()
            assert self._process.stdout.readline(), f"{act.__name__} failed"

        return do

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _flipped(blob: Blob, piece: memoryview) -> Blob:
    piece[piece.nbytes // 2] ^= 1
    return blob


class Folder(Place):
    def __init__(self, folder: Path) -> None:
        self._root, self._away = folder / "pages", folder / "away"
        self.url = f"file://{self._root}?max=1GiB"
        self.faults = {
            "damaged": Fault(self.damage, _nothing),
            "emptied": Fault(self._empty, _nothing),
            "wiped": Fault(self._wipe, _nothing),
            "gone": Fault(self._take_away, self._bring_back),
            "became a file": Fault(self._put_a_file, self._bring_back, is_silence=True),
        }

    def _empty(self) -> None:
        for path in list((self._root / "objects").rglob("*.*")):
            path.unlink(missing_ok=True)

    def _wipe(self) -> None:
        """All that is in it, as `rm -rf` does; who writes meanwhile may be quicker."""
        for path in sorted(self._root.iterdir()):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _take_away(self) -> None:
        self._root.rename(self._away)

    def _put_a_file(self) -> None:
        """Where it was; who writes there may be quicker."""
        self._take_away()
        while not self._root.is_file():
            shutil.rmtree(self._root, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._root.touch()

    def _bring_back(self) -> None:
        """What was written meanwhile goes; who still writes there may be quicker."""
        while self._away.exists():
            with contextlib.suppress(OSError):
                self._root.unlink()
            shutil.rmtree(self._root, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._away.rename(self._root)


class Disk(Place):
    """A small disk of its own, which somebody else fills to the last byte. Needs root."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "disk"
        self._root.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "quire-tests", str(self._root)]
        try:
            subprocess.run(mount, check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a disk of its own cannot be made here: {error}")
        self.url = f"file://{self._root}/pages?max=1GiB&reserve=0"
        self.faults = {"full": Fault(self._fill, self._empty)}

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._root)], check=True, timeout=30)

    def _fill(self) -> None:
        with contextlib.suppress(OSError), (self._root / OTHERS).open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass

    def _empty(self) -> None:
        (self._root / OTHERS).unlink()


class Redis(Place):
    def __init__(self, folder: Path) -> None:
        self._server = Valkey(folder)
        self._link = Link(self._server.port)
        self.url = f"redis://127.0.0.1:{self._link.port}"
        self.faults = {
            **_of_server(self._server.stop, self._server),
            **_of_link(self._link),
            "full": Fault(
                lambda: self._set("maxmemory", "1mb"), lambda: self._set("maxmemory", "0")
            ),
            "revoked": Fault(self._revoke, self._grant, is_silence=True),
            "damaged": Fault(self.damage, _nothing),
            "no values": Fault(self._replace_by_lists, _nothing),
            "forgotten": Fault(self._link.forget, _nothing),
            "a replica": Fault(
                lambda: self._server.say(b"REPLICAOF", b"127.0.0.1", b"1"),
                lambda: self._server.say(b"REPLICAOF", b"NO", b"ONE"),
            ),
        }

    def close(self) -> None:
        self._link.close()
        self._server.stop()

    def _replace_by_lists(self) -> None:
        with closing(open_store(self.url)) as store:
            for item in list(store.scan()):
                key = f"quire:{{{item.name.text}}}".encode()
                self._server.say(b"DEL", key)
                self._server.say(b"LPUSH", key, b"odd")

    def _set(self, name: str, value: str) -> None:
        self._server.say(b"CONFIG", b"SET", name.encode(), value.encode())

    def _revoke(self) -> None:
        """Another password from now on; who is in is thrown out."""
        self._set("requirepass", "another")
        self._server.password = "another"
        self._server.say(b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"yes")

    def _grant(self) -> None:
        self._set("requirepass", "")
        self._server.password = ""


class Bucket(Place):
    def __init__(self, folder: Path) -> None:
        self._server = Moto(folder)
        self._link = Link(self._server.port)
        self.url = self._server.url.replace(str(self._server.port), str(self._link.port))
        self.faults = {
            **_of_server(self._server.stop, self._server),
            **_of_link(self._link),
            "full": Fault(lambda: self._refuse("503 Slow Down", "SlowDown"), self._link.mend),
            "revoked": Fault(
                lambda: self._refuse("403 Forbidden", "AccessDenied"), self._link.mend
            ),
            "damaged": Fault(self.damage, _nothing),
        }

    def close(self) -> None:
        self._link.close()
        self._server.stop()

    def _refuse(self, status: str, code: str) -> None:
        """As S3 says it: the double grants everything, and is never full."""
        said = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
        self._link.refusal = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
            f"Content-Length: {len(said)}\r\n\r\n{said}"
        ).encode()


class Pool(Place):
    """A master and two holders; the relay is between us and the master."""

    def __init__(self, folder: Path, *, replicas: int = 1) -> None:
        self._pool = Mooncake(folder)
        self._link = FarLink(self._pool.port)
        self._hand = hand = Hand()
        own = f"mooncake://127.0.0.1:{self._link.port}?metrics=127.0.0.1:{self._pool.metrics_port}"
        self.url = f"{own}&replicas={replicas}"
        self.faults = {
            **_of_server(self._pool.kill_master, self._pool),
            **_of_link(self._link),
            "full": Fault(hand.does(fill, self._pool.url), hand.does(empty, self._pool.url)),
            "holder killed": Fault(lambda: self._pool.kill_holder(0), self._add_holder),
            "holder silent": Fault(self._pool.pause_holder, self._pool.holder_goes_on),
            "damaged": Fault(hand.does(damage, self._pool.url), _nothing),
        }
        if replicas > 1:
            self.faults = {"one of two replicas lost": self.faults["holder killed"]}

    def close(self) -> None:
        self._hand.close()
        self._link.close()
        self._pool.stop()

    def _add_holder(self) -> None:
        self._pool.holders.append(self._pool.start_holder())


PLACES: dict[str, Callable[[Path], Place]] = {
    "file": Folder,
    "disk": Disk,
    "redis": Redis,
    "s3": Bucket,
    "mooncake": Pool,
    "mooncake twice": lambda folder: Pool(folder, replicas=2),
}
_OF_ALL = ("killed", "paused", "restarted empty", "slow", "shaped", "cut", "full", "damaged")
MATRIX = [
    *(("file", fault) for fault in ("damaged", "emptied", "wiped", "gone", "became a file")),
    ("disk", "full"),
    *(("redis", f) for f in (*_OF_ALL, "revoked", "no values", "forgotten", "a replica")),
    *(("s3", fault) for fault in (*_OF_ALL, "revoked")),
    *(("mooncake", fault) for fault in (*_OF_ALL, "holder killed", "holder silent")),
    ("mooncake twice", "one of two replicas lost"),
]


def _of_server(kill: Act, server: Any) -> dict[str, Fault]:
    def restart() -> None:
        kill()
        server.start()

    return {
        "killed": Fault(kill, server.start, is_silence=True),
        "paused": Fault(server.pause, server.go_on),
        "restarted empty": Fault(restart, _nothing),
    }


def _of_link(link: Link | FarLink) -> dict[str, Fault]:
    return {
        "slow": Fault(lambda: link.slow(DELAY_S), link.mend),
        "shaped": Fault(lambda: link.narrow(RATE), link.mend),
        "cut": Fault(link.cut, link.mend, is_silence=True),
    }


def _nothing() -> None: ...


def _soon() -> float:
    return time.monotonic() + 30


def _blob(page_bytes: int) -> Blob:
    return Blob(memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(page_bytes)))
