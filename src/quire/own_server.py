"""A `quire serve` process of our own: started, awaited, listened to, ended. For `quire pd`, and for
benchmarks that need servers.

    child  ──standard output──▶  one line of JSON when it is ready: Ready
           ──standard error───▶  its messages, line by line
           ◀──standard input───  nothing: its end means that we are gone, and it goes too

Knows processes and their pipes, nothing of roles or of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from quire.child import when_orphaned
from quire.decoders import json_decoder
from quire.engine.messages import EngineInfo
from quire.errors import EngineError
from quire.logs import message_of

Say = Callable[[str, str], None]
"""Called with (name, line) for each line of a child's standard error."""

COMMAND = (sys.executable, "-m", "quire.cli", "serve", "--child")

_MAX_LINE_BYTES = 1 << 20
"""A traceback is one line of JSON: of one that is longer still, the end is what is told."""
_STOP_S = 20.0
_ORPHAN_GRACE_S = 10.0


class ChildReady(msgspec.Struct, frozen=True):
    """What a child says once it serves."""

    url: str
    info: EngineInfo


class Child:
    def __init__(self, name: str, say: Say) -> None:
        self.name = name
        self._say = say
        self._process: asyncio.subprocess.Process
        self._listening: asyncio.Task[None]
        self._last_words: deque[str] = deque(maxlen=1)

    async def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """In a session of its own: Ctrl-C is ours, and we say when it ends."""
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environ,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        self._listening = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> ChildReady:
        """Raises EngineError if it ends before."""
        assert self._process.stdout is not None
        line = await _next_line(self._process.stdout)
        if not line:
            raise EngineError(await self.gone())
        try:
            return json_decoder(ChildReady).decode(line)
        except msgspec.DecodeError:
            raise EngineError(
                f"the {self.name} server said {line[:80]!r} in place of being ready"
            ) from None

    async def gone(self) -> str:
        """Returns when it has ended; how, as one sentence."""
        code = await self._process.wait()
        await self._listening
        if code < 0:  # its last words say nothing of that
            return f"the {self.name} server was killed by signal {-code}"
        why = f": {message_of(self._last_words[0])}" if self._last_words else ""
        return f"the {self.name} server ended with code {code}{why}"

    async def stop(self) -> None:
        """Soon, and by force if it does not go by itself."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._listening

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while line := await _next_line(self._process.stderr):
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._last_words.append(text)
                self._say(self.name, text)


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """Empty: there is none any more. Whatever the child says is read, or it would stand still."""
    while True:
        try:
            return await stream.readline()
        except ValueError:  # too long: what there was of it is gone
            continue


def announce(url: str, info: EngineInfo) -> None:
    """A child's own: that it is ready."""
    sys.stdout.write(msgspec.json.encode(ChildReady(url, info)).decode() + "\n")
    sys.stdout.flush()


def end_with_standard_input() -> None:
    """A child's own: when whoever started it is gone, however it went, it ends as if told to; and
    if that takes too long, at once."""

    def leave() -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return True

    when_orphaned(0, leave, _ORPHAN_GRACE_S)
