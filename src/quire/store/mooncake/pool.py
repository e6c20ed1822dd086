"""Pool: Mooncake's client as we use it. The only file that imports it.

Its calls let other threads of Python work, except those that join and leave (some tenths of a
second). They know no deadline: they end when the pool's own timeouts say so, which are set here
unless the environment has them. Its close does not wait for calls that are under way and would pull
the ground from under them: here the last of those closes.

Only of a minute it does not wait for what moves: it says that it has failed, and goes on writing
into pages that are somebody else's by then. Leaving the pool ends that, and is waited for; whoever
asks next joins it again.

    code    of the client                 here
    -200    no room                       REJECTED
    -600    the object is larger          another size: CORRUPT
    -70x    not there, not yet, no more   MISS
    -800    a transfer failed: its holder is gone, or the object is smaller than the buffer
    -9xx    the master does not answer    FAILED, TIMEOUT
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from quire.errors import StoreError
from quire.store.mooncake.turns import Turns

NO_ROOM, OTHER_SIZE, EXISTS, TRANSFER_FAILED, NO_ANSWER = -200, -600, -705, -800, -901
GONE = (-702, -703, -704, -706, -707)


_DEFAULTS = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    # Of a silent holder each piece takes a second, four at a time: few wait for that, and the rest
    # is given up together.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "64",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "5000",
}


_ALONE = (
    "the Mooncake pool of {} cannot be joined ({}): start mooncake_master there, or check the "
    "store's URL"
)
_REACH_S = 2.0
_GIVES_UP_S = 55.0
"""A read that took so long, and failed, may still be moving: the client gives up after 60."""
_LOG_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"
_ONLY_FATAL = 3


class PoolSettings(NamedTuple):
    master: str
    local: str
    """How others reach this process: a host, or host:port."""
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    """Memory that this process gives to the pool; 0: it only uses what others give."""
    replicas: int = 1


class Bytes(NamedTuple):
    """An object's bytes in registered memory, in pieces."""

    key: str
    addresses: list[int]
    sizes: list[int]

    def cut(self, size_bytes: int) -> Bytes:
        """So many bytes of it, from the first on."""
        sizes, left = [], size_bytes
        for size in self.sizes:
            sizes.append(min(size, left))
            left -= sizes[-1]
        filled = [i for i, size in enumerate(sizes) if size]
        return Bytes(self.key, [self.addresses[i] for i in filled], [sizes[i] for i in filled])


class Pool:
    """Thread-safe."""

    def __init__(self, settings: PoolSettings) -> None:
        """Raises StoreError."""
        self._settings = settings
        self._registered: dict[int, int] = {}
        """Addresses and sizes."""
        self._client, self._config = join(settings)
        """None: the pool was left, and may be joined again."""
        self._ending: Any = None
        """The client that is asked nothing more, since what it was asked for does not end."""
        self._gets, self._puts = Turns(at_once()), Turns(at_once())
        self._calls = threading.Condition()
        self._num_calls = 0
        self._closed = False

    def register(self, address: int, size_bytes: int) -> bool:
        with self._call() as client:
            is_known = bool(client.register_buffer(address, size_bytes) == 0)
            if is_known:
                self._registered[address] = size_bytes
            return is_known

    def unregister(self, address: int) -> None:
        """Raises StoreError: then it is not registered again either, when the pool is joined."""
        with self._calls:
            self._registered.pop(address, None)
        with self._call() as client:
            client.unregister_buffer(address)

    def exists(self, keys: Sequence[str]) -> list[int]:
        """1 or 0, or a code."""
        with self._call() as client:
            return list(client.batch_is_exist(list(keys)))

    def put(self, objects: Sequence[Bytes]) -> list[int]:
        """0, or a code. What is there stays as it is."""
        keys, addresses, sizes = map(list, zip(*objects, strict=True))
        with self._puts.turn(), self._call() as client:
            return list(client.batch_put_from_multi_buffers(keys, addresses, sizes, self._config))

    def get(self, objects: Sequence[Bytes]) -> list[int]:
        """Sizes, or codes."""
        keys, addresses, sizes = map(list, zip(*objects, strict=True))
        with self._gets.turn():
            with self._call() as client:
                began_s = time.monotonic()
                codes = list(client.batch_get_into_multi_buffers(keys, addresses, sizes))
            if TRANSFER_FAILED in codes and time.monotonic() - began_s >= _GIVES_UP_S:
                self._end_transfers(client)
            return codes

    def size(self, key: str) -> int:
        with self._call() as client:
            return int(client.get_size(key))

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Also what somebody is reading."""
        with self._call() as client:
            return list(client.batch_remove(list(keys), True))

    def remove_matching(self, pattern: str) -> int:
        with self._call() as client:
            return int(client.remove_by_regex(pattern, True))

    def close(self) -> None:
        """At once, or when the last call has ended."""
        with self._calls:
            self._closed = True
            if not self._num_calls:
                self._leave()

    @contextmanager
    def _call(self) -> Iterator[Any]:
        with self._calls:
            if self._closed:
                raise StoreError("the store is closed: open it again")
            if self._client is None:
                self._join_again()
            elif self._client is self._ending:
                raise StoreError("what the pool was asked for does not end: ask again in a moment")
            self._num_calls += 1
            client = self._client
        try:
            yield client
        finally:
            with self._calls:
                self._num_calls -= 1
                if self._closed and not self._num_calls:
                    self._leave()
                self._calls.notify_all()

    def _end_transfers(self, client: Any) -> None:
        """Returns when nothing moves any more of what this client was asked for."""
        with self._calls:
            self._ending = client
            self._calls.wait_for(lambda: self._client is not client or not self._num_calls)
            if self._client is client:
                self._leave()
                self._calls.notify_all()

    def _leave(self) -> None:
        """While nobody calls."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _join_again(self) -> None:
        """Raises StoreError."""
        client, self._config = join(self._settings)
        for address, size_bytes in self._registered.items():
            if client.register_buffer(address, size_bytes):
                client.close()
                raise StoreError("the pool's client takes no more memory")
        self._client, self._ending = client, None


def at_once() -> int:
    """Calls that move bytes, each way. One moves all its objects side by side, by one thread of
    the client's, and waits by asking again and again whether they have come: eight at a time cost
    eight processors, and on a machine that has two, half of what is moved."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


def join(settings: PoolSettings) -> tuple[Any, Any]:
    """The client itself, and how it is to place what is put. Raises StoreError."""
    # Joining keeps all other threads of Python waiting: not for a master that is not there.
    host, _, port = settings.master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except (OSError, ValueError) as error:  # nobody is there, or it is no host's name
        raise StoreError(_ALONE.format(settings.master, str(error) or "no answer")) from None
    native = _load()
    client, config = native.MooncakeDistributedStore(), native.ReplicateConfig()
    config.replica_num = settings.replicas
    code = client.setup(
        settings.local,
        settings.metadata,
        settings.segment_bytes,
        0,  # no buffer of its own: bytes move from and to where they belong
        settings.protocol,
        settings.devices,
        settings.master,
    )
    if code:
        raise StoreError(_ALONE.format(settings.master, f"code {code}"))
    return client, config


def _load() -> Any:
    """The client's library. It would write a line for every miss: unless somebody has asked for
    its log, only what ends the process is written."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import store as native
    except ImportError as error:
        raise StoreError(
            f"Mooncake's client cannot be loaded ({error}): pip install quire[mooncake], and "
            "install libibverbs1 on the system"
        ) from error
    if "MC_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):  # another build of it: then it is loud
            ctypes.c_int.in_dll(ctypes.CDLL(native.__file__), _LOG_LEVEL).value = _ONLY_FATAL
    return native
