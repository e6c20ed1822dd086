"""What the scheduler's side tells the workers' in a step, and what these answer. Knows no vLLM.

vLLM carries both: orders as the connector's metadata, reports as the workers'. What is in them is
ours, as msgpack.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.decoders import msgpack_decoder
from quire.messages import Command, Completion, encode
from quire.types import OperationId

_commands = msgpack_decoder(list[Command])
_completions = msgpack_decoder(list[Completion])


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker must know of its leader, and agree with."""

    model_fingerprint: str
    host_pages: list[int]
    """By kind of attention."""
    page_size: int


@dataclass(slots=True)
class Orders:
    setup: Setup
    commands: bytes
    loads: dict[OperationId, str] = field(default_factory=dict)
    """By operation, the request whose blocks it fills."""
    refused: list[str] = field(default_factory=list)
    """Requests whose blocks will not be filled, and nothing tries to."""
    sending: dict[str, list[OperationId]] = field(default_factory=dict)
    """By finished request: what must have ended before its blocks may be freed."""
    preempted: bool = False
    """Blocks were taken away from somebody: what is being copied comes first."""
    taken: list[OperationId] = field(default_factory=list)
    """The same of a window that has moved on: what these copy comes first."""
    idle: bool = False
    """The model computes nothing in this step."""


def pack_orders(commands: list[Command]) -> bytes:
    return encode(commands) if commands else b""


def unpack_orders(data: bytes) -> list[Command]:
    return _commands.decode(data) if data else []


def pack_reports(completions: list[Completion]) -> bytes:
    return encode(completions)


def unpack_reports(data: bytes) -> list[Completion]:
    return _completions.decode(data)
