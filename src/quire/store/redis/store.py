"""RedisStore: what each call of a store says to the servers.

    page             PREFIX{NAME}              SET if new, GET, EXISTS; a value is published as a
                                               whole
    quarantined      PREFIXquarantine{NAME}    RENAME, for a week; also of what is no value at all
                                               but a list or the like

The server decides what goes when memory is short. With a policy by use (`allkeys-lru`, `-lfu`) a
path keeps its beginning longest: of a path that is used the end is touched first, and what lies
behind a hole is not touched at all. With `noeviction` it says no when it is full, and so do we.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress, takewhile
from operator import not_
from typing import Any, TypeVar

from quire.errors import StoreError, StoreURLError
from quire.store.base import Blob, Landings, NewObject, ObjectName, StoredObject, StoreStats
from quire.store.lately import just_made
from quire.store.paths import Sent, put_paths
from quire.store.redis.connection import Address, Login, RedisConnection, turned_away
from quire.store.redis.nodes import Nodes, RedisExchange
from quire.store.redis.wire import ProtocolError, ServerError, WireBuffer, command, set_command
from quire.store.url import Options, StoreURL, whole_number
from quire.types import PAGE_KEY_BYTES, PageKey, PageStatus

DEFAULT_PORT = 6379
OPEN_TIMEOUT_S = 5.0
_TOUCH_TIMEOUT_S = 2.0
_ADMIN_TIMEOUT_S = 30.0
_QUARANTINE_S = 7 * 24 * 3600
_REFUSALS = ("OOM", "READONLY", "MISCONF", "NOPERM", "NOREPLICAS")
"""What a server says that takes no writes, or none of ours, and still serves reads."""
_SCAN = 512
"""Keys asked for at a time."""

Kind = TypeVar("Kind")


class RedisStore:
    def __init__(self, nodes: Nodes, prefix: str = "quire:") -> None:
        self._nodes = nodes
        self._prefix = prefix.encode()
        self._made = just_made()

    # ---- pages ----------------------------------------------------------------------------------

    def contains(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """In one round trip to each server."""
        keys = [self._key(name) for name in names]
        there = [answer == 1 for answer in self._all(b"EXISTS", keys, deadline)]
        self._made.discard(compress(names, map(not_, there)))
        return there

    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        landed = into.landed if isinstance(into, Landings) else _untold
        exchanges = [
            RedisExchange(key, command(b"GET", key), _reading(into[i], partial(landed, i)))
            for i, key in enumerate(map(self._key, names))
        ]
        answers = self._nodes.ask(exchanges, deadline)
        return [
            _status(answer) if isinstance(answer, Exception) else _got(answer, blob)
            for answer, blob in zip(answers, into, strict=True)
        ]

    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        def send(news: Sequence[NewObject], needed: Sequence[ObjectName]) -> Sent:
            """All of it in one round trip to each server."""
            keys = [self._key(new.name) for new in news]
            looks = [RedisExchange(key, command(b"EXISTS", key)) for key in map(self._key, needed)]
            sets = [
                RedisExchange(key, _Setting(key, new)) for key, new in zip(keys, news, strict=True)
            ]
            answers = self._nodes.ask([*looks, *sets], deadline)
            looked, put = answers[: len(looks)], answers[len(looks) :]
            self._made.add(new.name for new, a in zip(news, put, strict=True) if a == b"OK")
            self._made.discard(name for name, a in zip(needed, looked, strict=True) if a == 0)
            return Sent(
                [_written(a) if isinstance(a, Exception) else PageStatus.OK for a in put],
                [_status(a) if isinstance(a, Exception) else a == 1 for a in looked],
            )

        def take_back(names: Sequence[ObjectName]) -> None:
            self._made.discard(names)
            keys = map(self._key, names)
            self._nodes.ask([RedisExchange(key, command(b"UNLINK", key)) for key in keys], deadline)

        return put_paths(objects, send=send, take_back=take_back)

    def has_made(self, name: ObjectName) -> bool:
        """See Making."""
        return name in self._made

    def touch(self, names: Sequence[ObjectName], *, used_ns: int, each: bool = False) -> None:
        deadline = time.monotonic() + _TOUCH_TIMEOUT_S
        if not each:
            there = self.contains(names, deadline=deadline)
            names = names[: len(list(takewhile(bool, there)))]
        keys = [self._key(name) for name in reversed(names)]
        self._nodes.ask([RedisExchange(key, command(b"TOUCH", key)) for key in keys], deadline)

    def quarantine(self, name: ObjectName) -> bool:
        self._made.discard([name])
        deadline, key = time.monotonic() + _TOUCH_TIMEOUT_S, self._key(name)
        aside = self._prefix + b"quarantine" + key[len(self._prefix) :]
        (moved,) = self._nodes.ask([RedisExchange(key, command(b"RENAME", key, aside))], deadline)
        if isinstance(moved, ServerError) and "no such key" in str(moved):
            return False
        if isinstance(moved, ServerError):  # we may not: better gone than damaged for ever
            return self._all(b"UNLINK", [key], deadline) == [1]
        if isinstance(moved, Exception):
            raise _as_error(moved)
        expire = command(b"EXPIRE", aside, b"%d" % _QUARANTINE_S)
        self._nodes.ask([RedisExchange(key, expire)], deadline)
        return True

    # ---- for people -----------------------------------------------------------------------------

    def scan(self) -> Iterator[StoredObject]:
        now = time.time()
        for keys in self._keys():
            deadline = time.monotonic() + _ADMIN_TIMEOUT_S
            sizes = [RedisExchange(key, command(b"STRLEN", key)) for key in keys]
            idle = [RedisExchange(key, command(b"OBJECT", b"IDLETIME", key)) for key in keys]
            answers = self._nodes.ask(sizes + idle, deadline)
            for key, size, idle_s in zip(keys, answers, answers[len(keys) :], strict=False):
                name, num_bytes = self._name(key), size if isinstance(size, int) else 0
                # What is no value is in the way of one, and is there to be seen.
                if name is not None and (num_bytes or _is_no_value(size)):
                    # Policies by frequency do not say when.
                    used_s = now - idle_s if isinstance(idle_s, int) else now
                    yield StoredObject(name, num_bytes, used_s)

    def clear(self, *, wait: bool = False) -> int:
        """When it returns, all of it is gone; the server frees the memory in the background."""
        count = 0
        for keys in self._keys():
            own = [key for key in keys if self._name(key) is not None]
            deadline = time.monotonic() + _ADMIN_TIMEOUT_S
            count += sum(self._all(b"UNLINK", own, deadline))
        self._made.clear()
        return count

    def stats(self) -> StoreStats:
        """Memory and evictions of the servers, whoever uses them."""
        used = room = evicted = 0
        bounded = True
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        for address in self._nodes.addresses:
            with _told():
                told = _as(bytes, self._nodes.ask_node(address, (b"INFO",), deadline))
            info = _fields(told)
            used += info.get("used_memory", 0)
            evicted += info.get("evicted_keys", 0)
            bounded = bounded and bool(info.get("maxmemory"))
            room += info.get("maxmemory", 0)
        return StoreStats(None, used, room if bounded else None, evicted)

    def check_rights(self, address: Address, deadline: float) -> None:
        """May we read here? Raises OSError, StoreError. The rest shows when it is used."""
        nobody = self._key(ObjectName(PageKey(bytes(PAGE_KEY_BYTES)), "full", 0, 1))
        asked = [RedisExchange(nobody, command(word, nobody)) for word in (b"EXISTS", b"GET")]
        for answer in self._nodes.ask(asked, deadline):
            if isinstance(answer, OSError | StoreError):
                raise answer
            # ERR: it knows no such command, as a Sentinel.
            if isinstance(answer, ServerError) and answer.code in ("NOPERM", "ERR"):
                raise turned_away(address, answer)

    def close(self) -> None:
        self._nodes.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _all(self, word: bytes, keys: Sequence[bytes], deadline: float) -> list[int]:
        """One command for each key. Raises OSError, StoreError if any of them fails."""
        answers = self._nodes.ask(
            [RedisExchange(key, command(word, key)) for key in keys], deadline
        )
        for answer in answers:
            if isinstance(answer, Exception):
                raise _as_error(answer)
        return [_as(int, answer) for answer in answers]

    def _key(self, name: ObjectName) -> bytes:
        # In braces, so that a name and what belongs to it are on one server of a cluster.
        return b"%b{%b}" % (self._prefix, name.text.encode())

    def _name(self, key: bytes) -> ObjectName | None:
        """None: it is not a page of ours."""
        text = key[len(self._prefix) :]
        if not key.startswith(self._prefix) or text[:1] != b"{" or text[-1:] != b"}":
            return None
        return ObjectName.parse(text[1:-1].decode("ascii", "replace"))

    def _keys(self) -> Iterator[list[bytes]]:
        """Of all servers, with this prefix; one may come twice."""
        pattern = _escaped(self._prefix) + b"{*"
        for address in self._nodes.addresses:
            cursor = b"0"
            while True:
                words = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN)
                deadline = time.monotonic() + _ADMIN_TIMEOUT_S
                with _told():
                    answer = _as(list, self._nodes.ask_node(address, words, deadline))
                cursor, found = _as(bytes, answer[0] if answer else None), answer[-1]
                keys = [_as(bytes, key) for key in _as(list, found)]
                if keys:
                    yield list(dict.fromkeys(keys))
                if cursor == b"0":
                    break


class _Setting:
    """SET of an object, whose bytes are asked for when it is sent."""

    def __init__(self, key: bytes, new: NewObject) -> None:
        self._key, self._new = key, new

    def __iter__(self) -> Iterator[WireBuffer]:
        return iter(set_command(self._key, self._new.blob, unless_there=True))


def _reading(blob: Blob, landed: Callable[[], None]) -> Any:
    def hear(connection: RedisConnection) -> int | ServerError:
        size = connection.answer_into(blob)
        if isinstance(size, int) and _got(size, blob) is PageStatus.OK:
            landed()
        return size

    return hear


def _untold(index: int) -> None:
    """Nobody wants to know."""


def _got(size: int, blob: Blob) -> PageStatus:
    if size < 0:
        return PageStatus.MISS
    is_whole = size == blob.header.nbytes + blob.payload.nbytes
    return PageStatus.OK if is_whole else PageStatus.CORRUPT


def _is_no_value(answer: Any) -> bool:
    """The key holds something else."""
    return isinstance(answer, ServerError) and answer.code == "WRONGTYPE"


def _status(failure: Exception) -> PageStatus:
    if isinstance(failure, TimeoutError):
        return PageStatus.TIMEOUT
    if _is_no_value(failure):
        return PageStatus.CORRUPT
    return PageStatus.FAILED


def _written(failure: Exception) -> PageStatus:
    is_refusal = isinstance(failure, ServerError) and failure.code in _REFUSALS
    return PageStatus.REJECTED if is_refusal else _status(failure)


def _as_error(failure: Exception) -> OSError | StoreError:
    """What a call that has no statuses raises: no key, value or password is in it."""
    if isinstance(failure, OSError | StoreError):
        return failure
    if isinstance(failure, ServerError):
        return StoreError(f"the store's server says {failure.code}: look at its log")
    return StoreError(f"the store's server cannot be understood ({failure}): check the URL")


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (ServerError, ProtocolError) as error:
        raise _as_error(error) from None


def _as(kind: type[Kind], answer: Any) -> Kind:
    """Raises StoreError: it is something else."""
    if not isinstance(answer, kind):
        raise StoreError("the store's server says what no Redis does: check the URL")
    return answer


def _fields(info: bytes) -> dict[str, int]:
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: int(value) for name, _, value in lines if value.isdecimal()}


def _escaped(prefix: bytes) -> bytes:
    """As a pattern that matches only itself."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]^\\" else bytes([c]) for c in prefix)


# ---- by URL --------------------------------------------------------------------------------------


def open_url(url: StoreURL) -> RedisStore:
    """`redis://[user:password@]host[:port][/database]?prefix=…`; rediss:// with `ca=FILE` if the
    server's certificate is not one that the system trusts."""
    options = Options(url)
    prefix, ca = options.text("prefix", "quire:"), options.text("ca", "")
    options.finish()
    if not prefix or not prefix.isascii() or not prefix.isprintable() or set(prefix) & set("{} "):
        raise StoreURLError(
            f"option 'prefix' in {url.shown!r} must be of printable ASCII without spaces or braces"
        )
    address, login = address_of(url), login_of(url, ca)
    deadline = time.monotonic() + OPEN_TIMEOUT_S
    try:
        store = RedisStore(Nodes(address, login, deadline=deadline), prefix)
        try:
            store.check_rights(address, deadline)
        except BaseException:
            store.close()
            raise
    except (OSError, ProtocolError) as error:
        raise _unreachable(address, error, has_tls=login.tls is not None) from None
    return store


def _unreachable(address: Address, error: OSError | ProtocolError, *, has_tls: bool) -> StoreError:
    reason = str(error) or "no answer"
    fix = "start Redis or Valkey there, or check the store's URL"
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = f"certificate verify failed: {error.verify_message}"
        fix = "give who signed its certificate as ?ca=FILE, and the host as the certificate has it"
    elif has_tls and isinstance(error, ssl.SSLError | TimeoutError | ConnectionError):
        fix += "; if it is there without TLS, write redis://"
    elif isinstance(error, ProtocolError | ConnectionResetError):
        fix += "; if it speaks TLS, write rediss://"
    return StoreError(f"{address.text} cannot be reached ({reason}): {fix}")


def address_of(url: StoreURL) -> Address:
    _, _, place = url.host.rpartition("@")
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    host = (host if colon else place).strip("[]")
    number = whole_number(port) if colon else DEFAULT_PORT
    if not host or number is None or not 0 < number < 1 << 16:
        slash = ", and a slash in a password as %2F" if "@" in url.path else ""
        raise StoreURLError(f"{url.shown!r} names no server: write {url.scheme}://host:6379{slash}")
    return Address(host, number)


def login_of(url: StoreURL, ca: str) -> Login:
    user, password = url.credentials
    database = whole_number(url.path.strip("/") or "0")
    if database is None:
        raise StoreURLError(f"{url.shown!r}: what follows the host is the database, a number")
    if ca and url.scheme != "rediss":
        raise StoreURLError(f"option 'ca' in {url.shown!r} is for rediss://")
    tls = None
    if url.scheme == "rediss":
        try:
            tls = ssl.create_default_context(cafile=ca or None)
        except OSError as error:
            raise StoreURLError(f"option 'ca' in {url.shown!r}: {error}") from error
    return Login(user, password, database, tls)
