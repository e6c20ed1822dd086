"""EventLine against a server that is told, byte for byte, what to say."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from quire.router.eventline import EventLine

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG_S = 60.0

Says = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def serving(says: Says) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            await says(reader, writer)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def opened(url: str, *, timeout_s: float = LONG_S, **headers: str) -> EventLine:
    trust = ssl.create_default_context()
    return await EventLine.open(
        url, "POST", "/v1/x", headers, b"asked", trust=trust, timeout_s=timeout_s
    )


async def rest(line: EventLine) -> bytes:
    content = b""
    while (piece := await line.read()) is not None:
        content += piece
    return content


def test_what_is_asked_and_what_is_answered() -> None:
    asked = bytearray()

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.extend(await reader.readuntil(b"asked"))
        writer.write(
            b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunk(b"one") + chunk(b"two") + chunk(b"")
        )
        await writer.drain()

    async def main() -> None:
        async with serving(says) as url:
            line = await opened(url, authorization="Bearer gr\xfcn")
            status, headers = await line.head()
            assert (status, headers["content-type"]) == (200, "text/event-stream")
            assert await rest(line) == b"onetwo"
            assert await line.read() is None
            line.close()

    run(main)
    head = bytes(asked).lower()
    assert head.startswith(b"post /v1/x http/1.1\r\n")
    assert b"authorization: bearer gr\xfcn\r\n" in head
    assert b"content-length: 5\r\n" in head


@pytest.mark.parametrize("where", range(3))
def test_a_piece_comes_as_soon_as_the_server_says_it(where: int) -> None:
    """However its bytes are cut on the way."""
    event = chunk(b"data: 1\n\n")
    cut = (1, len(event) // 2, len(event) - 1)[where]

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + event[:cut])
        await writer.drain()
        writer.write(event[cut:])
        await reader.read()  # nothing more, until the client goes

    async def main() -> None:
        async with serving(says) as url:
            line = await opened(url)
            content = b""
            while content != b"data: 1\n\n":
                content += await line.read() or b""
            line.close()

    run(main)


def test_what_came_before_the_end_is_read_before_it_is_told() -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"asked")
        writer.write(HEAD + chunk(b"half"))
        await writer.drain()

    async def main() -> None:
        async with serving(says) as url:
            line = await opened(url)
            await line.head()
            assert await line.read() == b"half"
            with pytest.raises(ConnectionError):
                await line.read()
            with pytest.raises(ConnectionError):
                await line.read()
            line.close()

    run(main)


@pytest.mark.parametrize(
    "said", [b"220 mail.example ESMTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000]
)
def test_what_is_no_answer_ends_the_line(said: bytes) -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await reader.read()

    async def main() -> None:
        async with serving(says) as url:
            line = await opened(url)
            with pytest.raises(ConnectionError):
                await line.head()
            line.close()

    run(main)


def test_a_server_that_says_nothing_is_left() -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await reader.read()

    async def main() -> None:
        async with serving(says) as url:
            line = await opened(url, timeout_s=0.05)
            with pytest.raises(TimeoutError):
                await line.read()
            line.close()

    run(main)


def test_time_in_which_nobody_waits_does_not_count() -> None:
    """A client that is slow to take what it is sent is no silence of the server's."""
    goes_on = asyncio.Event()

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"one"))
        await goes_on.wait()
        writer.write(chunk(b"two"))
        await reader.read()

    async def main() -> None:
        async with serving(says) as url:
            line = await opened(url, timeout_s=5.0)
            line._timeout_s = 0.01  # from its next look on
            assert await line.read() == b"one"
            line._timer.cancel()
            for _ in range(3):
                await asyncio.sleep(0.02)
                line._look()
            line._timeout_s = LONG_S
            goes_on.set()
            assert await line.read() == b"two"
            line.close()

    run(main)


def test_whoever_waits_is_told_when_the_line_is_given_up() -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await reader.read()

    async def main() -> None:
        async with serving(says) as url:
            line = await opened(url)
            await line.head()
            waiting = asyncio.create_task(line.read())
            while line._woken is None:
                await asyncio.sleep(0)
            line.give_up()
            with pytest.raises(TimeoutError):
                await waiting
            line.close()

    run(main)


def test_a_slow_reader_stops_the_server() -> None:
    """So much as the sockets hold, and no more of it in our memory than the bound."""
    total = 64 << 20
    sent = 0

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD)
        piece = chunk(b"x" * (1 << 20))
        for _ in range(total >> 20):
            writer.write(piece)
            await writer.drain()
            sent += 1 << 20
        writer.write(chunk(b""))
        await writer.drain()

    async def main() -> None:
        async with serving(says) as url:
            line = await opened(url)
            await line.head()
            before = -1
            while sent != before:  # until the server stands still
                before = sent
                await asyncio.sleep(0.3)
            assert sent < total
            assert len(line._waiting) < 2 << 20
            assert len(await rest(line)) == total
            line.close()

    run(main)


def test_of_a_connection_that_never_was_nothing_is_left() -> None:
    """As with a server whose certificate nobody trusts: each try would look at the clock for
    ever."""

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"220 this is no TLS")
        await writer.drain()

    async def main() -> None:
        async with serving(says) as url:
            with pytest.raises(OSError):
                await opened(url.replace("http:", "https:"))
        while any(type(each) is EventLine for each in gc.get_objects()):
            await asyncio.sleep(0.01)
            gc.collect()

    run(main)


def test_nobody_there() -> None:
    async def main() -> None:
        async with serving(lambda _reader, _writer: asyncio.sleep(0)) as url:
            pass
        with pytest.raises(OSError):
            await opened(url)

    run(main)
