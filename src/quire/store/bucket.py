"""Pages as objects of a bucket: `s3://bucket/prefix`, `gs://…`, `az://…`, through obstore.

    page            PREFIX/objects/xx/NAME       xx: two digits of its key, so that none is crowded
    quarantined     PREFIX/quarantine/NAME

Many requests at once, on an event loop of its own: a bucket is far away and wide. A bucket orders
nothing by use and has no budget: what goes, and when, is its lifecycle's. Credentials come from
where that ecosystem keeps them (environment, see bucket_login.py, the machine's role), never from
the URL.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import obstore
from obstore import exceptions, store

from quire.errors import StoreError, StoreURLError
from quire.store.base import Blob, NewObject, ObjectName, StoredObject, StoreStats
from quire.store.bucket_errors import (
    as_error,
    as_status,
    is_missing,
    is_no_bucket,
    is_not_implemented,
)
from quire.store.bucket_login import login_of_file
from quire.store.lately import just_made
from quire.store.paths import Sent, put_paths
from quire.store.url import Options, StoreURL
from quire.types import PAGE_KEY_BYTES, PageKey, PageStatus

if TYPE_CHECKING:
    from obstore.store import ObjectStore

OPEN_TIMEOUT_S = 10.0
_ADMIN_TIMEOUT_S = 60.0
_ASIDE_TIMEOUT_S = 5.0
"""To set a damaged page aside: whoever has read it is waiting."""
_REQUESTS = 256
"""Under way at once, of one call: no server is asked about many objects in one request, so a probe
is as many, side by side, and takes as long as one."""
_RANGE_BYTES = 8 << 20
"""Of one request for an object's bytes, at most."""
_LOOK_S = 0.05
_LET_GO_S = 0.1
"""The library's threads are not done with Python when a call has its answer, and would crash one
that ends meanwhile: so long they are left alone with it."""
_DELETED = 500
"""Objects deleted at a time."""

_OK = PageStatus.OK
Result = TypeVar("Result")


class _Whole(NamedTuple):
    """An object as it is sent."""

    name: ObjectName
    data: bytes


class BucketStore:
    def __init__(self, bucket: ObjectStore) -> None:
        """`bucket`: with the prefix, if there is one."""
        self._bucket = bucket
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-bucket")
        self._thread.daemon = True
        self._thread.start()
        self._requests: set[asyncio.Task[Any]] = set()
        """Under way, of all calls; known to the loop only."""
        self._made = just_made()
        self._knows_conditions = True
        """Until the server says that it does not."""
        self._lock = threading.Lock()
        self._closed = False

    # ---- pages ----------------------------------------------------------------------------------

    def contains(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        found = self._all(self._look, names, deadline)
        for answer in found:
            if isinstance(answer, BaseException):
                raise as_error(answer)
        return [answer is True for answer in found]

    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        pairs = list(zip(names, into, strict=True))
        return [as_status(answer) for answer in self._all(self._read, pairs, deadline)]

    async def _read(self, item: tuple[ObjectName, Blob]) -> PageStatus:
        """A large one in ranges, side by side: one connection to a bucket is slow, however wide the
        line to it is."""
        name, blob = item
        path, wanted = path_of(name), blob.header.nbytes + blob.payload.nbytes

        async def read(begin: int, end: int | None) -> int:
            """Returns how large the object is. Raises StoreError: less has come than was said."""
            limits: dict[str, Any] = {} if end is None else {"options": {"range": (begin, end)}}
            answer = await obstore.get_async(self._bucket, path, **limits)
            size: int = answer.meta["size"]
            if size > wanted:
                return size
            at = begin
            async for chunk in answer.stream(min_chunk_size=1 << 20):
                at = _spread(memoryview(chunk), at, blob)
            if at != min(size, end or size):
                raise StoreError("the bucket sent less of an object than it has")
            return size

        try:
            size = await read(0, _RANGE_BYTES if wanted > _RANGE_BYTES else None)
        except exceptions.GenericError as error:
            # Of an empty object there is no range (416). An error's text has names and times in it
            # too: what it says is not enough to call an object wrong.
            if "416" not in str(error):
                raise
            size = (await obstore.head_async(self._bucket, path))["size"]
            if size:
                raise
        if size > wanted:  # its header may tell whose it is
            head = await obstore.get_range_async(
                self._bucket, path, start=0, end=blob.header.nbytes
            )
            blob.header[:] = memoryview(head)
        else:
            begins = range(_RANGE_BYTES, size, _RANGE_BYTES) if wanted > _RANGE_BYTES else ()
            ranges = [read(at, min(at + _RANGE_BYTES, size)) for at in begins]
            # If one fails, the others end before anybody is told: they write into the page.
            for came in await asyncio.gather(*ranges, return_exceptions=True):
                if isinstance(came, BaseException):
                    raise came
        return _OK if size == wanted else PageStatus.CORRUPT

    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        async def one(item: _Whole | ObjectName) -> PageStatus:
            if isinstance(item, _Whole):
                return await self._write(item)
            return _OK if await self._look(item) else PageStatus.MISS

        def send(news: Sequence[NewObject], needed: Sequence[ObjectName]) -> Sent:
            """All of it side by side; put together here, where others do the same meanwhile."""
            wholes = [_Whole(new.name, b"".join(new.blob)) for new in news]
            asked = [name for name in needed if name not in self._made]
            answers = [as_status(answer) for answer in self._all(one, [*asked, *wholes], deadline)]
            known = {_OK: True, PageStatus.MISS: False}
            said = dict(zip(asked, (known.get(s, s) for s in answers), strict=False))
            # Where what is written is not found, there is no bucket any more.
            lost = {PageStatus.MISS: PageStatus.FAILED}
            written = [lost.get(status, status) for status in answers[len(asked) :]]
            return Sent(written, [said.get(name, True) for name in needed])

        def take_back(names: Sequence[ObjectName]) -> None:
            paths = [path_of(name) for name in names]
            self._run(lambda: obstore.delete_async(self._bucket, paths), deadline)
            self._made.discard(names)

        return put_paths(objects, send=send, take_back=take_back)

    async def _look(self, name: ObjectName) -> bool:
        try:
            await obstore.head_async(self._bucket, path_of(name))
        except (FileNotFoundError, exceptions.NotFoundError):
            self._made.discard([name])
            return False
        return True

    def check_bucket(self, deadline: float) -> None:
        """Is it there, and are we let in? Raises OSError, StoreError."""
        nobody = path_of(ObjectName(PageKey(bytes(PAGE_KEY_BYTES)), "full", 0, 1))
        answer = self._run(lambda: obstore.get_async(self._bucket, nobody), deadline)
        if not isinstance(answer, BaseException):
            return
        # Only the body of an answer tells a bucket that is not there from such an object.
        if not is_missing(answer) or is_no_bucket(answer):
            raise as_error(answer)

    async def _write(self, new: _Whole) -> PageStatus:
        """One object, published when all of it has come."""
        path, data = path_of(new.name), new.data
        if self._knows_conditions:
            try:
                await obstore.put_async(
                    self._bucket, path, data, mode="create", use_multipart=False
                )
            except (FileExistsError, exceptions.AlreadyExistsError):
                return _OK
            except (NotImplementedError, exceptions.BaseError) as error:
                if not is_not_implemented(error):
                    raise
            else:
                self._made.add([new.name])
                return _OK
        # Over what is there: the same page, if anything. Nobody says whether it was made here.
        await obstore.put_async(self._bucket, path, data, use_multipart=False)
        self._knows_conditions = False
        return _OK

    def has_made(self, name: ObjectName) -> bool:
        """See Making."""
        return name in self._made

    def touch(self, names: Sequence[ObjectName], *, used_ns: int, each: bool = False) -> None:
        """A bucket does not know what is used."""

    def quarantine(self, name: ObjectName) -> bool:
        self._made.discard([name])
        aside, deadline = f"quarantine/{name.text}", time.monotonic() + _ASIDE_TIMEOUT_S
        answer = self._run(
            lambda: obstore.rename_async(self._bucket, path_of(name), aside), deadline
        )
        if is_missing(answer):
            return False
        if isinstance(answer, BaseException):
            raise as_error(answer)
        return True

    # ---- for people -----------------------------------------------------------------------------

    def scan(self) -> Iterator[StoredObject]:
        """Raises OSError, StoreError."""
        try:
            for listed in obstore.list(self._bucket, prefix="objects"):
                for item in listed:
                    name = ObjectName.parse(str(item["path"]).rpartition("/")[2])
                    if name is not None and item["path"] == path_of(name):
                        yield StoredObject(name, item["size"], item["last_modified"].timestamp())
        except (exceptions.BaseError, OSError) as error:
            raise as_error(error) from None

    def clear(self, *, wait: bool = False) -> int:
        paths = [path_of(item.name) for item in self.scan()]
        for at in range(0, len(paths), _DELETED):
            some, deadline = paths[at : at + _DELETED], time.monotonic() + _ADMIN_TIMEOUT_S
            answer = self._run(partial(obstore.delete_async, self._bucket, some), deadline)
            if isinstance(answer, BaseException):
                raise as_error(answer)
        self._made.clear()
        return len(paths)

    def stats(self) -> StoreStats:
        """Counting would mean listing all of it."""
        return StoreStats()

    def close(self) -> None:
        """Calls that are under way end, with failures."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _all(
        self,
        work: Callable[[Any], Coroutine[Any, Any, Result]],
        items: Sequence[Any],
        deadline: float,
    ) -> list[Result | BaseException]:
        """Side by side; when it returns, nothing of it is under way."""
        if not items:
            return []

        async def all_of_them() -> list[Result | BaseException]:
            room = asyncio.Semaphore(_REQUESTS)

            async def one(item: Any) -> Result:
                async with room:
                    return await work(item)

            tasks = [asyncio.ensure_future(one(item)) for item in items]
            self._requests.update(tasks)
            _, late = await asyncio.wait(tasks, timeout=max(0.0, deadline - time.monotonic()))
            for task in late:
                task.cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            self._requests.difference_update(tasks)
            return [
                TimeoutError() if task in late else a
                for task, a in zip(tasks, answers, strict=True)
            ]

        with self._lock:
            if self._closed:
                return [StoreError("the store is closed: open it again") for _ in items]
            call = asyncio.run_coroutine_threadsafe(all_of_them(), self._loop)
        return call.result()

    async def _end_calls(self) -> None:
        """A call may have been told to start only just now: until none is left."""
        me = asyncio.current_task()
        while calls := asyncio.all_tasks() - {me}:
            for request in self._requests:
                request.cancel()
            await asyncio.wait(calls, timeout=_LOOK_S)
        await asyncio.sleep(_LET_GO_S)

    def _run(
        self, work: Callable[[], Awaitable[Result]], deadline: float
    ) -> Result | BaseException:
        """Awaited on the loop, where it must also be called."""

        async def one(call: Callable[[], Awaitable[Result]]) -> Result:
            return await call()

        return self._all(one, [work], deadline)[0]


def path_of(name: ObjectName) -> str:
    return f"objects/{name.key[:1].hex()}/{name.text}"


def _spread(chunk: memoryview, at: int, blob: Blob) -> int:
    """A chunk of an object to where it belongs; returns where the next one begins."""
    split = blob.header.nbytes
    if at < split:
        head = chunk[: split - at]
        blob.header[at : at + head.nbytes] = head
        at, chunk = at + head.nbytes, chunk[head.nbytes :]
    if chunk.nbytes:
        blob.payload[at - split : at - split + chunk.nbytes] = chunk
    return at + chunk.nbytes


# ---- by URL --------------------------------------------------------------------------------------


def open_url(url: StoreURL) -> BucketStore:
    """`s3://bucket/prefix?endpoint=http://…&region=…`; also gs:// and az://."""
    opened = BucketStore(bucket_of(url))
    try:
        opened.check_bucket(time.monotonic() + OPEN_TIMEOUT_S)
    except (StoreError, OSError) as error:
        opened.close()
        reason = str(error) or "no answer in time, check its endpoint"
        raise StoreError(f"{url.shown}: {reason}") from None
    return opened


def bucket_of(url: StoreURL) -> ObjectStore:
    """With the prefix, if there is one. Raises StoreURLError, StoreError."""
    options = Options(url)
    endpoint, region = options.text("endpoint", ""), options.text("region", "")
    options.finish()
    if not url.host or "@" in url.host or ":" in url.host or "@" in endpoint:
        raise StoreURLError(
            f"{url.shown!r} must name a bucket and nothing else before the path: credentials come "
            "from the environment, the server's address from ?endpoint="
        )
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise StoreURLError(
            f"option 'endpoint' in {url.shown!r} must begin with http:// or https://"
        )
    settings: dict[str, Any] = {}
    if endpoint:
        settings["endpoint"] = endpoint
    if region:
        settings["region"] = region
    if settings and url.scheme != "s3":
        raise StoreURLError(f"{url.shown!r}: endpoint and region are for s3://")
    if url.scheme == "s3" and (login := login_of_file()) is not None:
        settings["credential_provider"] = login
    try:
        return store.from_url(
            f"{url.scheme}://{url.host}{url.path}",
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=OPEN_TIMEOUT_S),
                "timeout": timedelta(seconds=_ADMIN_TIMEOUT_S),
            },
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=OPEN_TIMEOUT_S)},
            **settings,
        )
    except (exceptions.BaseError, ValueError, OSError) as error:
        kind = type(error).__name__
        raise StoreURLError(
            f"{url.shown!r} names no bucket that can be opened ({kind}): check it, and what the "
            "environment says of its account"
        ) from None
