"""What a store's own client does with the same bytes: what `quire store bench` compares with.

No headers, no checksums, no question before a write: pages as they are, as fast as that client
moves them. Knows how each kind of store is spoken to; measures nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from quire.errors import StoreError
from quire.store.base import ObjectName
from quire.store.url import StoreURL

TIMEOUT_S = 120.0


class RawClient(Protocol):
    """Of one thread."""

    does: str
    """In words, beside what the store does."""

    def put(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None: ...

    def get(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None: ...

    def close(self) -> None: ...


class RawRedis:
    """redis-py, as its users call it: a pipeline for each call. One connection to each server."""

    def __init__(self, url: StoreURL) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from quire.store.redis.store import address_of, login_of

        ca = url.options.get("ca", "")
        address, login = address_of(url), login_of(url, ca)
        parser = "with hiredis" if redis.utils.HIREDIS_AVAILABLE else "without hiredis"
        self.does = f"redis-py {redis.__version__} {parser}; SET and GET, a pipeline for each call"
        place: dict[str, Any] = {
            "host": address.host,
            "port": address.port,
            "username": login.user or None,
            "password": login.password or None,
            "socket_timeout": TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),  # a server that has fallen silent is told at once
        }
        if login.tls is not None:
            place |= {"ssl": True, "ssl_ca_certs": ca or None}
        self._failure: type[Exception] = redis.RedisError
        with _told(self._failure, "cannot be used", "of a cluster it needs the right +command"):
            self._client: Any = redis.Redis(db=login.database, **place)
            if _is_cluster(self._client, redis.ResponseError):
                self._client.close()
                self._client = redis.RedisCluster(**place)
                self.does += ", of each server"
        self._prefix = url.options.get("prefix", "quire:")

    @staticmethod
    def serves(url: StoreURL) -> bool:
        """Is the library there?"""
        return url.scheme in ("redis", "rediss") and importlib.util.find_spec("redis") is not None

    def put(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        together = self._client.pipeline(transaction=False)
        for name, page in zip(names, pages, strict=True):
            together.set(f"{self._prefix}{{{name.text}}}", page)
        with _told(self._failure):
            expect(all(together.execute()))

    def get(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        together = self._client.pipeline(transaction=False)
        for name in names:
            together.get(f"{self._prefix}{{{name.text}}}")
        with _told(self._failure):
            found = together.execute()
        for page, content in zip(pages, found, strict=True):
            expect(content is not None and len(content) == page.nbytes)
            page[:] = content

    def close(self) -> None:
        self._client.close()


def _is_cluster(client: Any, refusal: type[Exception]) -> bool:
    try:
        return bool(client.execute_command("CLUSTER SLOTS"))
    except refusal:  # it is in no cluster, or does not say
        return False


class RawBucket:
    """obstore, all pages of a call side by side."""

    does = "obstore, every thread with a loop and connections of its own; PUT without a condition"

    def __init__(self, url: StoreURL) -> None:
        from quire.store.bucket import bucket_of

        self._bucket = bucket_of(url)
        self._loop = asyncio.new_event_loop()

    def put(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        import obstore

        from quire.store.bucket import path_of

        async def send() -> None:
            puts = [
                obstore.put_async(self._bucket, path_of(name), bytes(page), use_multipart=False)
                for name, page in zip(names, pages, strict=True)
            ]
            await asyncio.gather(*puts)

        with _told(obstore.exceptions.BaseError):
            self._loop.run_until_complete(send())

    def get(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        import obstore

        from quire.store.bucket import path_of

        async def read(name: ObjectName, page: memoryview) -> None:
            answer = await obstore.get_async(self._bucket, path_of(name))
            page[:] = memoryview(await answer.bytes_async())

        async def all_of_them() -> None:
            await asyncio.gather(*(read(*each) for each in zip(names, pages, strict=True)))

        with _told(obstore.exceptions.BaseError):
            self._loop.run_until_complete(all_of_them())

    def close(self) -> None:
        self._loop.close()


class RawPool:
    """Mooncake's client, from and to memory that it knows. `shared`: what join_pool() gave."""

    does = "batch_put_from and batch_get_into by every thread"

    def __init__(self, url: StoreURL, shared: Any) -> None:
        self._client, self._config = shared
        self._prefix = url.options.get("prefix", "quire:")

    def put(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        keys, places, sizes = self._words(names, pages)
        codes = self._client.batch_put_from(keys, places, sizes, self._config)
        expect(set(codes) == {0})

    def get(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        keys, places, sizes = self._words(names, pages)
        came = list(self._client.batch_get_into(keys, places, sizes))
        expect(came == sizes)

    def close(self) -> None:
        """It is not this thread's alone."""

    def _words(
        self, names: Sequence[ObjectName], pages: Sequence[memoryview]
    ) -> tuple[list[str], list[int], list[int]]:
        from quire.store.mooncake.registration import address

        keys = [self._prefix + name.text for name in names]
        return keys, [address(page) for page in pages], [page.nbytes for page in pages]


class RawDisk:
    """Direct I/O, as the file store also writes new data, into one file with room for all that will
    come: making room is not timed. Every page is new to the disk, and all threads share the file.
    """

    does = "direct I/O into one preallocated file"

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC
        self._fd = os.open(folder / "raw", flags, 0o600)
        try:
            os.posix_fallocate(self._fd, 0, size_bytes)
        except OSError:
            os.close(self._fd)
            raise
        self._lock = threading.Lock()
        self._end = 0
        self._places: dict[ObjectName, int] = {}

    def put(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        with self._lock:
            for name, page in zip(names, pages, strict=True):
                self._places[name] = self._end
                self._end += page.nbytes
        for name, page in zip(names, pages, strict=True):
            expect(os.pwritev(self._fd, [page], self._places[name]) == page.nbytes)

    def get(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        for name, page in zip(names, pages, strict=True):
            expect(os.preadv(self._fd, [page], self._places[name]) == page.nbytes)

    def close(self) -> None:
        os.close(self._fd)


def join_pool(url: StoreURL, memory: memoryview) -> Any:
    """A client of its own that knows `memory`."""
    from quire.store.mooncake.pool import join
    from quire.store.mooncake.registration import address
    from quire.store.mooncake.store import read_url

    client, config = join(read_url(url).settings)
    expect(client.register_buffer(address(memory), memory.nbytes) == 0)
    return client, config


def expect(is_right: bool) -> None:
    if not is_right:
        raise StoreError("the raw client did not move every page: is the store full?")


@contextlib.contextmanager
def _told(
    failure: type[Exception],
    said: str = "did not move every page",
    advice: str = "is the store full?",
) -> Iterator[None]:
    """Not what the library says: keys and values are in it."""
    try:
        yield
    except failure as error:
        raise StoreError(f"the raw client {said} ({type(error).__name__}): {advice}") from None
