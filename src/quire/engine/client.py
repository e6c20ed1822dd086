"""EngineClient: the server's end of the line to an engine process, for asyncio.

    client = await EngineClient.start(config, on_progress=...)
    async with client.generate(tokens, params) as outputs:      # leaving early aborts
        async for output in outputs: ...
    status = await client.ask(GetStatus(), EngineStatus)
    await client.close()

Knows the process and the socket, nothing of HTTP or text. The engine holds the other end of a
pipe to us: when this process dies, however it dies, the engine and its ranks end too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.asyncio

from quire.child import send_startup
from quire.decoders import msgpack_decoder
from quire.engine.config import EngineConfig
from quire.engine.messages import (
    AbortRequest,
    Answer,
    CacheWish,
    EngineInfo,
    EngineReport,
    EngineStartFailed,
    EngineStatus,
    Finish,
    Generate,
    Handed,
    Output,
    Outputs,
    PutQuestion,
    Question,
    SamplingParams,
    Started,
    Starting,
    StopEngine,
    ToEngine,
    ToServer,
    decode_to_server,
    encode,
)
from quire.engine.startup import EngineStartup, model_environment
from quire.errors import EngineError
from quire.progress import Share
from quire.types import RequestId

START_TIMEOUT_S = 900.0
CLOSE_TIMEOUT_S = 20.0
_MAX_QUEUED_MESSAGES = 100_000

Result = TypeVar("Result")


class EngineClient:
    """One event loop's. Build it with `start`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.info: EngineInfo
        """Set when `start` returns."""
        self.status: EngineStatus | None = None
        """The latest report; renewed about twice a second while the engine works."""
        self.failure: str | None = None
        """Why the engine is gone, once it is."""
        self.heard_s = time.monotonic()
        """When it last said something; it does so twice a second, and after every step."""
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_MESSAGES)
        self._process: subprocess.Popen[bytes] | None = None
        self._started: asyncio.Future[EngineInfo]
        self._serving = False
        self._gone = asyncio.Event()
        self._outputs: dict[RequestId, asyncio.Queue[Output]] = {}
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._progress: Share | None = None
        self._on_handed: Callable[[Handed], None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        on_progress: Share | None = None,
        on_handed: Callable[[Handed], None] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> EngineClient:
        """Start an engine process and wait until it can serve. Raises EngineError."""
        client = cls(config)
        client._progress = on_progress
        client._on_handed = on_handed
        try:
            await client._launch(timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def num_requests(self) -> int:
        """Requests given to the engine and not finished."""
        return len(self._outputs)

    @contextlib.asynccontextmanager
    async def generate(
        self,
        tokens: bytes,
        params: SamplingParams,
        *,
        salt: str = "",
        priority: int = 0,
        timeout_s: float = 600.0,
        prefill: Sequence[str] = (),
        cache: CacheWish | None = None,
        said: bytes = b"",
        trace: str = "",
    ) -> AsyncIterator[AsyncIterator[Output]]:
        """The outputs of one request; the last one has `finish`. Leaving the block early aborts.
        `prefill`: for decode servers, page servers to ask instead of those of the configuration.
        `cache`: what is to be done with the prompt's pages afterwards. `said`: tokens of the answer
        that there are already; the outputs are those after them. `trace`: its hand-overs are told
        to `on_handed` under this name."""
        request = RequestId(f"r{next(self._ids)}")
        queue: asyncio.Queue[Output] = asyncio.Queue()
        self._outputs[request] = queue
        finished = False

        async def outputs() -> AsyncIterator[Output]:
            nonlocal finished
            while not finished:
                output = await queue.get()
                finished = output.finish is not None
                yield output

        try:
            if self.failure is not None:
                queue.put_nowait(_failed(request, self.failure))
            else:
                self._send(
                    Generate(
                        request,
                        tokens,
                        params,
                        salt,
                        priority,
                        timeout_s,
                        list(prefill),
                        cache,
                        said,
                        trace,
                    )
                )
            yield outputs()
        finally:
            del self._outputs[request]
            if not finished and self.failure is None:
                self._send(AbortRequest(request))

    async def ask(
        self, question: Question, answer: type[Result], *, timeout_s: float = 60.0
    ) -> Result:
        """Raises EngineError with a sentence: what is wrong, or that no answer came in time."""
        if self.failure is not None:
            raise EngineError(self.failure)
        number = next(self._ids)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        try:
            self._send(PutQuestion(number, question))
            async with asyncio.timeout(timeout_s):
                return msgpack_decoder(answer).decode(await future)
        except TimeoutError:
            raise EngineError(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            del self._answers[number]

    async def wait_gone(self) -> str:
        """Returns when the engine process has ended; why, as one sentence."""
        await self._gone.wait()
        return self.failure or "the engine was stopped"

    async def close(self) -> None:
        """Stop the engine, by force if it does not go by itself."""
        process = self._process
        if process is not None and process.poll() is None:
            if self._serving:
                with contextlib.suppress(EngineError):
                    self._send(StopEngine())
            else:  # still building: it listens to nothing but signals
                process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    while process.poll() is None:
                        await asyncio.sleep(0.02)
            if process.poll() is None:
                process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if process is not None:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        self._lost("the engine was stopped")
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- inside ---------------------------------------------------------------------------------

    async def _launch(self, timeout_s: float) -> None:
        self._started = asyncio.get_running_loop().create_future()
        address = f"ipc://{self._folder / 'engine'}"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise EngineError(
                f"no local socket in the temporary directory {self._folder} ({error.strerror}): "
                "set TMPDIR to a shorter path, or to one that can be written"
            ) from error
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quire.engine.process"],
            stdin=subprocess.PIPE,
            env=model_environment(),
        )
        send_startup(self._process, EngineStartup(address, self.config))
        self._tasks = [
            asyncio.create_task(self._receive(), name="quire-engine-receive"),
            asyncio.create_task(self._watch(self._process), name="quire-engine-watch"),
        ]
        try:
            async with asyncio.timeout(timeout_s):
                self.info = await self._started
                self._serving = True
        except TimeoutError:
            raise EngineError(f"the engine did not start within {timeout_s:g} s") from None

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            for frame in frames:
                self._handle(decode_to_server(frame))

    def _handle(self, message: ToServer) -> None:
        self.heard_s = time.monotonic()
        match message:
            case Outputs(outputs):
                for output in outputs:
                    queue = self._outputs.get(output.id)
                    if queue is not None:  # else it was aborted: stale
                        queue.put_nowait(output)
            case Handed():
                if self._on_handed is not None:
                    self._on_handed(message)
            case Answer():
                self._answered(message)
            case EngineReport(status):
                self.status = status
            case Starting(what, done):
                if self._progress is not None:
                    self._progress(what, done)
            case Started(info):
                self._started.set_result(info)
            case EngineStartFailed(error):
                if not self._started.done():
                    self._started.set_exception(EngineError(error))

    def _answered(self, answer: Answer) -> None:
        future = self._answers.get(answer.id)
        if future is None or future.done():
            return  # nobody waits for it any more
        if answer.error:
            future.set_exception(EngineError(answer.error))
        else:
            future.set_result(answer.result)

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)  # for its last words to arrive
        code = process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._lost(f"the engine process {how}; see its messages above, then start the server again")

    def _lost(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
        if hasattr(self, "_started") and not self._started.done():
            self._started.set_exception(EngineError(reason))
        for request, queue in self._outputs.items():
            queue.put_nowait(_failed(request, reason))
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineError(reason))
        self._gone.set()

    def _send(self, message: ToEngine) -> None:
        # A send that must not block is over when it returns; its future says how it went.
        sent = asyncio.ensure_future(self._socket.send(encode(message), zmq.NOBLOCK))
        if not sent.done() or sent.exception() is not None:
            raise EngineError("the engine does not take messages: it is too far behind")


def _failed(request: RequestId, reason: str) -> Output:
    return Output(request, [], finish=Finish.ERROR, error=reason)
