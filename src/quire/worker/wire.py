"""What travels between a leader and a worker process, beyond commands and completions.

Typed msgpack, one union per direction; nothing is ever unpickled. Anything that does not decode is
counted and dropped by whoever receives it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from quire.decoders import msgpack_decoder
from quire.messages import Command, Completion
from quire.store.account import StoreAccount
from quire.worker.config import WorkerConfig


class _Message(msgspec.Struct, frozen=True, tag_field="t"):
    pass


class Startup(_Message, frozen=True, tag="startup"):
    """Through the child's standard input, which then stays open: its end means the leader's."""

    address: str
    identity: bytes
    """Name the child must use on the socket; unguessable, so nobody else can speak for it."""
    heartbeat_s: float
    config: WorkerConfig
    extra: bytes = b""
    """For whoever runs the worker, if it is more than a worker: an engine's rank."""


class StepCommands(_Message, frozen=True, tag="work"):
    commands: list[Command]


class Parcel(_Message, frozen=True, tag="parcel"):
    """Something between the two programs that run leader and worker; in order with the rest."""

    data: bytes


class Shutdown(_Message, frozen=True, tag="shutdown"):
    pass


class Ready(_Message, frozen=True, tag="ready"):
    rank: int
    peer_address: str = ""
    """Of its page server; empty when it has none."""


class StartFailed(_Message, frozen=True, tag="start_failed"):
    error: str


class Report(_Message, frozen=True, tag="report"):
    """Also sent now and then with nothing to complete: a sign of life."""

    completions: list[Completion]
    peer_counters: dict[str, int] = {}
    store: StoreAccount | None = None
    """With signs of life only."""


ToWorker = StepCommands | Parcel | Shutdown
ToLeader = Ready | StartFailed | Report | Parcel

to_worker = msgpack_decoder(ToWorker)
to_leader = msgpack_decoder(ToLeader)
_encoder = msgspec.msgpack.Encoder()

Kind = TypeVar("Kind")


def encode(message: ToWorker | ToLeader) -> bytes:
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[Kind], data: bytes) -> Kind | None:
    """None: not one of ours."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
