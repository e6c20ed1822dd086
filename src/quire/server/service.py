"""Service: what every endpoint shares. One engine, one tokenizer, the limits and the figures.

Also the door: a request is admitted before it costs anything, and leaves its place when it ends,
however it ends. Knows no HTTP but the errors it raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

from quire.engine.config import EngineConfig, Role
from quire.engine.messages import (
    CacheWish,
    Drain,
    EngineInfo,
    EngineStatus,
    GetStatus,
    Output,
    Question,
    SamplingParams,
)
from quire.errors import EngineError
from quire.server.config import ServerConfig
from quire.server.incoming import TenantCounts, UnknownFields, Warned
from quire.server.metrics import Metrics
from quire.server.recorder import Recorder
from quire.server.responses.remembered import ResponseMemory
from quire.text.prompting import Prompting
from quire.web.errors import (
    ApiError,
    engine_gone,
    invalid,
    model_not_found,
    overloaded,
    shutting_down,
    unexpected,
    wrong_role,
)
from quire.web.glances import SharedAnswers

if TYPE_CHECKING:
    from quire.web.traced import Tracer

STATUS_TIMEOUT_S = 1.0
LOAD_TIMEOUT_S = 0.25
DRAIN_TIMEOUT_S = 30.0
DRAIN_LOOK_S = 0.1

logger = logging.getLogger("quire.server")
Result = TypeVar("Result")


class EngineLike(Protocol):
    """What the server needs of EngineClient."""

    config: EngineConfig
    info: EngineInfo
    status: EngineStatus | None
    failure: str | None
    heard_s: float

    @property
    def num_requests(self) -> int: ...

    def generate(
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
    ) -> AbstractAsyncContextManager[AsyncIterator[Output]]: ...

    async def ask(
        self, question: Question, answer: type[Result], *, timeout_s: float = 60.0
    ) -> Result: ...


class Service:
    def __init__(
        self,
        engine: EngineLike,
        prompting: Prompting,
        config: ServerConfig,
        metrics: Metrics,
        *,
        recorder: Recorder | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.prompting = prompting
        self.config = config
        self.metrics = metrics
        self.recorder = recorder
        self.tracer = tracer
        self.clock = clock
        self.instance = secrets.token_hex(8)
        """Another one each time a server starts: whoever remembers things of it begins anew."""
        self.unknown: UnknownFields | None = None if config.strict else Warned()
        """Takes fields that nobody knows; None: they are wrong."""
        self.shared = SharedAnswers(clock)
        """What several look at: those of /ui, those of `quire top`."""
        self.responses = ResponseMemory()
        """What /v1/responses may go on from."""
        self.draining = False
        """The server is to stop: what is admitted may finish, no more is."""
        self._num_admitted = 0
        self.tenants = TenantCounts(config.tenant_requests)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call the model; the first is its own."""
        return self.config.served_names or (self.info.name,)

    def check_name(self, model: str) -> None:
        """Raises ApiError."""
        if model not in self.names:
            raise model_not_found(model, ", ".join(self.names))

    @property
    def ailment(self) -> str | None:
        """Why the engine cannot be relied on: it is gone, or it says nothing any more."""
        if self.engine.failure is not None:
            return self.engine.failure
        silent_s = time.monotonic() - self.engine.heard_s
        if silent_s <= self.config.engine_silence_s:
            return None
        return (
            f"the engine has said nothing for {silent_s:.0f} s: if no step can take so long, it "
            "hangs; start the server again"
        )

    @contextlib.contextmanager
    def admit(self, num_sequences: int, model: str, salt: str = "") -> Iterator[None]:
        """A place for that many generations, for as long as the block lasts. Raises ApiError."""
        if self.engine.failure is not None:
            raise engine_gone(self.engine.failure)
        if self.draining:
            raise shutting_down()
        if self.info.role == Role.PREFILL:
            raise wrong_role()
        self.check_name(model)
        engine = self.engine.config
        room = engine.max_running + engine.max_waiting
        if num_sequences > room:
            raise invalid(
                "n",
                f"n times the number of prompts is {num_sequences}, and this server takes {room} "
                "at a time (max_running + max_waiting): ask for fewer",
            )
        # Those still being tokenised are admitted, but the engine has not seen them yet.
        busy = max(self._num_admitted, self.engine.num_requests)
        if busy + num_sequences > room:
            self.metrics.turned_away.labels("queue_full").inc()
            raise overloaded(
                f"{busy} requests are running or waiting, of {engine.max_running} (max_running) "
                f"and {engine.max_waiting} (max_waiting): try again later",
                "queue_full",
            )
        try:
            self.tenants.enter(salt, num_sequences)
        except ApiError:
            self.metrics.turned_away.labels("tenant_full").inc()
            raise
        self._num_admitted += num_sequences
        try:
            yield
        finally:
            self._num_admitted -= num_sequences
            self.tenants.leave(salt, num_sequences)

    def timeout_s(self, asked: float | None) -> float:
        """Raises ApiError."""
        limit = self.config.request_timeout_s
        if asked is not None and asked > limit:
            raise invalid("timeout", f"timeout is {asked:g} s: at most {limit:g} s are possible")
        return limit if asked is None else asked

    async def load(self, *, is_exact: bool = True) -> dict[str, int]:
        """Requests in the engine, and their tokens. Its reports are at most half a second old while
        it works, and the last one may be from before its work was done: so it is asked, but not for
        long. Not `is_exact`: as it reported."""
        status = self.engine.status
        if is_exact and status is not None and status.running + status.waiting:
            with contextlib.suppress(EngineError):
                status = await self.engine.ask(GetStatus(), EngineStatus, timeout_s=LOAD_TIMEOUT_S)
        if status is None:
            return dict.fromkeys(("running", "waiting", "running_tokens", "waiting_tokens"), 0)
        return {
            "running": status.running,
            "waiting": status.waiting,
            "running_tokens": status.running_tokens,
            "waiting_tokens": status.waiting_tokens,
        }

    async def begin_draining(self) -> dict[str, int]:
        """Take no more, here or from other engines; how much is left to finish."""
        self.draining = True
        status = await self.engine.ask(Drain(), EngineStatus, timeout_s=DRAIN_TIMEOUT_S)
        handovers = status.handover.open if status.handover is not None else 0
        requests = max(self._num_admitted, status.running + status.waiting)
        return {"requests": requests, "handovers": handovers}

    async def drain(self) -> None:
        """Returns when all that was taken is finished, and taken by those it was computed for; or
        when the engine is gone."""
        self.draining = True
        while self.engine.failure is None:
            with contextlib.suppress(EngineError):  # it may be too busy to answer
                if not any((await self.begin_draining()).values()):
                    return
            await asyncio.sleep(DRAIN_LOOK_S)

    async def fresh_status(self) -> EngineStatus | None:
        """The engine's state now, or else the last that is known."""
        try:
            return await self.engine.ask(GetStatus(), EngineStatus, timeout_s=STATUS_TIMEOUT_S)
        except EngineError:
            return self.engine.status

    def failed_unexpectedly(self, error: BaseException, request_id: str) -> ApiError:
        """A bug, here or below: logged, counted, and this one request's."""
        self.metrics.unexpected_errors.inc()
        logger.error("request %s failed", request_id, exc_info=error)
        return unexpected(request_id)
