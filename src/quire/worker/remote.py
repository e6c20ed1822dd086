"""RemoteWorkers: one process per rank, reached over a ZMQ ipc socket in a private directory.

Knows processes, liveness and the socket; the messages inside are passed on untouched. All use is
from one thread, and nothing but start-up and close() waits.

    STARTING ──Ready──▶ READY ──silent too long──▶ DYING (killed) ──exited──▶ LOST
        │                 └──────────exited───────────────────────────────────▶ LOST
        └──StartFailed, exited, past the deadline──▶ the whole start fails with WorkerError

`WorkerLost` is sent on entering LOST, when the process has really ended: until then it could
still be writing into memory it shares.
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from quire.child import send_startup
from quire.errors import WorkerError
from quire.memory.sizing import check_host_budget
from quire.messages import Command, Completion, WorkerLost
from quire.store.account import StoreAccount, over_ranks
from quire.worker import wire
from quire.worker.config import WorkerConfig
from quire.worker.group import total

_MAX_IPC_PATH = 100  # sun_path holds 108 bytes; zmq needs a few
_MAX_QUEUED_MESSAGES = 10_000
_START_POLL_MS = 50
_LAST_WORDS_MS = 500


class ChildState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DYING = "dying"
    LOST = "lost"


@dataclass(slots=True)
class _Child:
    rank: int
    identity: bytes
    process: subprocess.Popen[bytes]
    state: ChildState
    last_seen: float
    peer_address: str = ""
    peer_counters: dict[str, int] = field(default_factory=dict)
    store: StoreAccount = field(default_factory=StoreAccount)
    reason: str = ""
    """Why it is being given up, once it is."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """How long a worker process may take."""

    start_timeout_s: float = 120.0
    """To import, to allocate and to touch its pools."""
    heartbeat_s: float = 0.5
    silence_s: float = 30.0
    """Without a word before it is taken for hung and killed."""
    close_timeout_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Program:
    """What runs in each process, if it is more than a worker."""

    module: str = "quire.worker.process"
    extra: bytes = b""
    """Handed to it at its start."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to ours."""


class RemoteWorkers:
    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        *,
        liveness: Liveness | None = None,
        clock: Callable[[], float] = time.monotonic,
        program: Program | None = None,
    ) -> None:
        """Starts all ranks and waits for them. Raises WorkerError (nothing is left running),
        MemoryBudgetError when together they do not fit."""
        check_host_budget(
            sum(config.host_bytes for config in configs),
            what=f"{len(configs)} workers",
            option="host_pages",
        )
        self._liveness = liveness or Liveness()
        self._program = program or Program()
        self._clock = clock
        self._children: dict[bytes, _Child] = {}
        self._early: list[Completion] = []
        self._parcels: list[tuple[int, bytes]] = []
        self.dropped_messages = 0
        """Messages that were not ours, or that a rank sent in another's name."""
        self._closed = False
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))  # mode 0700
        self.address = f"ipc://{self._folder / 'leader'}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._bind()
            for config in configs:
                self._spawn(config)
            self._await_ready()
        except BaseException:
            self._kill_all()
            raise

    @property
    def num_ranks(self) -> int:
        return len(self._children)

    @property
    def peer_addresses(self) -> list[str]:
        children = sorted(self._children.values(), key=lambda child: child.rank)
        return [child.peer_address for child in children]

    @property
    def news(self) -> list[int | zmq.Socket[bytes]]:
        return [self._socket]

    def peer_counters(self) -> dict[str, int]:
        return total(child.peer_counters for child in self._children.values())

    def store_account(self) -> StoreAccount:
        """As last heard of."""
        return over_ranks(child.store for child in self._children.values())

    def submit(self, commands: list[Command]) -> None:
        if commands:
            self._tell_all(wire.StepCommands(commands))

    def send(self, data: bytes) -> None:
        """A parcel for the program of every living rank, after the commands submitted so far."""
        self._tell_all(wire.Parcel(data))

    def take_parcels(self, wait_ms: int = 0) -> list[tuple[int, bytes]]:
        """(rank, data) of what the ranks' programs have sent; waits a moment if there is none."""
        if wait_ms and not self._parcels:
            self._socket.poll(wait_ms)
        self._early = self._receive()
        parcels, self._parcels = self._parcels, []
        return parcels

    def poll(self) -> list[Completion]:
        completions = self._receive()
        now = self._clock()
        for child in self._children.values():
            if child.state is ChildState.READY:
                silent_s = now - child.last_seen
                if silent_s > self._liveness.silence_s:
                    self._give_up(child, f"no sign of life for {silent_s:.1f} s")
            if child.state is not ChildState.LOST and child.process.poll() is not None:
                completions += self._receive()  # what it said last
                child.state = ChildState.LOST
                reason = child.reason or _exit_reason(child.process)
                completions.append(WorkerLost(child.rank, f"worker {child.rank}: {reason}"))
        return completions

    def close(self) -> None:
        if self._closed:
            return
        deadline = self._clock() + self._liveness.close_timeout_s
        self._tell_all(wire.Shutdown())
        for child in self._children.values():
            if child.state is ChildState.READY:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline - self._clock()))
        self._kill_all()

    # ---- start and end of processes -------------------------------------------------------------

    def _bind(self) -> None:
        if len(str(self._folder)) > _MAX_IPC_PATH:
            raise WorkerError(
                f"the temporary directory {self._folder} is too long a path for a local socket: "
                "set TMPDIR to a shorter one"
            )
        # A message for a peer that is not there, or reads too slowly, must raise, not vanish.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_MESSAGES)
        self._socket.bind(self.address)

    def _spawn(self, config: WorkerConfig) -> None:
        identity = f"rank-{config.rank}-{secrets.token_hex(16)}".encode()
        program = self._program
        process = subprocess.Popen(
            [sys.executable, "-m", program.module],
            stdin=subprocess.PIPE,
            env={**os.environ, **program.environment},
        )
        self._children[identity] = _Child(
            config.rank, identity, process, ChildState.STARTING, self._clock()
        )
        startup = wire.Startup(
            self.address, identity, self._liveness.heartbeat_s, config, program.extra
        )
        send_startup(process, startup)

    def _await_ready(self) -> None:
        deadline = self._clock() + self._liveness.start_timeout_s
        while starting := [
            child for child in self._children.values() if child.state is ChildState.STARTING
        ]:
            self._socket.poll(_START_POLL_MS)
            self._early += self._receive()
            for child in starting:
                if child.state is ChildState.STARTING and child.process.poll() is not None:
                    self._socket.poll(_LAST_WORDS_MS)
                    self._early += self._receive()
                    child.reason = child.reason or _exit_reason(child.process)
                if child.reason:
                    raise WorkerError(f"worker {child.rank} could not start: {child.reason}")
            if self._clock() >= deadline and starting[0].state is ChildState.STARTING:
                raise WorkerError(
                    f"worker {starting[0].rank} did not start within "
                    f"{self._liveness.start_timeout_s:g} s: raise start_timeout_s or make its "
                    "pools smaller"
                )

    def _give_up(self, child: _Child, reason: str) -> None:
        child.reason = reason
        child.state = ChildState.DYING
        child.process.kill()

    def _kill_all(self) -> None:
        self._closed = True
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.kill()
        for child in self._children.values():
            child.process.wait()
            child.state = ChildState.LOST
            if child.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.process.stdin.close()
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- messages -------------------------------------------------------------------------------

    def _tell_all(self, message: wire.ToWorker) -> None:
        data = wire.encode(message)
        for child in self._children.values():
            if child.state is not ChildState.READY:
                continue
            try:
                self._socket.send_multipart([child.identity, data], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # Unreachable, or so far behind that its queue is full. A command that is lost
                # would never be reported on, so the rank cannot go on.
                self._give_up(child, f"does not take commands ({error})")

    def _receive(self) -> list[Completion]:
        completions, self._early = self._early, []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return completions
            child = self._children.get(frames[0])
            message = wire.decode(wire.to_leader, frames[1]) if len(frames) == 2 else None
            if child is None or message is None or child.state is ChildState.LOST:
                self.dropped_messages += 1
                continue
            child.last_seen = self._clock()
            completions += self._handle(child, message)

    def _handle(self, child: _Child, message: wire.ToLeader) -> list[Completion]:
        match message:
            case wire.Ready(rank=child.rank) if child.state is ChildState.STARTING:
                child.state = ChildState.READY
                child.peer_address = message.peer_address
            case wire.StartFailed(error=error):
                child.reason = error
            case wire.Report(completions=completions, peer_counters=counters, store=store):
                child.peer_counters = counters
                if store is not None:
                    child.store = store
                own = [c for c in completions if c.rank == child.rank]
                self.dropped_messages += len(completions) - len(own)
                return own
            case wire.Parcel(data=data):
                self._parcels.append((child.rank, data))
            case _:
                pass
        return []


def _exit_reason(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"killed by signal {-code}"
    return f"exited with code {code}"
