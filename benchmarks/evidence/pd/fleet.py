"""The engines of `quire bench pd`: one prefill engine and one for each side, all on one device.

Every side has the same memory, enough for its conversations on device and host together; the
prefill engine has enough for those of all decode engines. There is no store.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from evidence.pd.plan import Plan, Side
from quire.engine.client import EngineClient
from quire.engine.config import EngineConfig, Role
from quire.memory.page_layout import DTYPE_BYTES
from quire.models import describe
from quire.peer.kinds import TransportKind
from quire.progress import Progress

_SECRET = "only for a benchmark of hand-overs"
_DEVICE_SHARE = 0.6
"""Of a wave's state, that a side's device holds; its host holds all of it."""
_ROOM = 1.1


@dataclass(frozen=True, slots=True)
class Fleet:
    prefill: EngineClient
    sides: dict[Side, EngineClient]

    @property
    def clients(self) -> list[EngineClient]:
        return [self.prefill, *self.sides.values()]

    @property
    def page_servers(self) -> list[str]:
        return [self.prefill.info.peer]

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))


async def start(plan: Plan, progress: Progress) -> Fleet:
    """All at the same time. Raises EngineError; then none is left."""
    sides = plan.sides()
    configs = [_config(plan, None), *(_config(plan, side) for side in sides)]
    progress("starting engines", 0, len(configs))
    started: list[EngineClient] = []

    async def one(config: EngineConfig) -> EngineClient:
        client = await EngineClient.start(config)
        started.append(client)
        progress("starting engines", len(started), len(configs))
        return client

    tasks = [asyncio.create_task(one(config)) for config in configs]
    try:
        prefill, *others = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(BaseException):
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in started))
        raise
    return Fleet(prefill, dict(zip(sides, others, strict=True)))


def memory_bytes(plan: Plan, side: Side | None) -> tuple[int, int]:
    """Of the pages on the device and on the host; None: of the prefill engine."""
    token, longest = token_bytes(plan), plan.longest + plan.page_size
    wave = int(plan.wave_tokens() * token * _ROOM)
    in_flight = int(plan.at_once * longest * token * _ROOM)
    device = max(int(wave * _DEVICE_SHARE), in_flight)
    if side is None:
        return device, max(wave * 2 * len(plan.transports) - device, in_flight)
    return device, max(wave, in_flight) if side.has_cache else in_flight


def token_bytes(plan: Plan) -> int:
    """State of one token."""
    shape = describe(plan.model)
    width = 2 * len(shape.full_layers) * shape.num_kv_heads * shape.head_dim
    return width * DTYPE_BYTES[dtype_of(plan)]


def dtype_of(plan: Plan) -> str:
    return "bfloat16" if plan.device.startswith("cuda") else "float32"


def _config(plan: Plan, side: Side | None) -> EngineConfig:
    device_bytes, host_bytes = memory_bytes(plan, side)
    if side is None:
        role, transport = Role.PREFILL, TransportKind.AUTO
    else:
        role = Role.UNIFIED if side.transport is None else Role.DECODE
        transport = side.transport or TransportKind.AUTO
    is_decode = role is Role.DECODE
    return EngineConfig(
        model=str(plan.model),
        name="bench",
        device=plan.device,
        dtype=dtype_of(plan),
        page_size=plan.page_size,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        chunk_tokens=plan.chunk_tokens,
        threads=plan.threads,
        role=role,
        peer_port=None if role is Role.UNIFIED else 0,
        peer_secret=_SECRET,
        peer_transport=transport,
        decode_cache=side is None or side.has_cache,
        decode_computes=plan.decode_computes if is_decode else 0,
    )
