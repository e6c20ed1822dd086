"""What vLLM's subscribers read (0.32): a batch is an array, an event in it a map with its type.

    [time, [event, …], data-parallel rank]        events in the order they happened

Knows how the cache's own events are said in that language: a page is a block, its key the block's
hash, a tier a medium. Of the parts of a page only full attention is told: it is there for every
prefix that can be used.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from quire.engine.layouts import FULL
from quire.manager import CacheEvent, EventKind
from quire.types import PAGE_KEY_BYTES

MEDIA = {"device": "GPU", "host": "CPU", "store": "STORAGE"}


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    pass


class BlockStored(_Event, frozen=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(_Event, frozen=True):
    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(_Event, frozen=True):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = 0


def told(events: Iterable[CacheEvent], block_size: int) -> list[KvEvent]:
    return [_told(event, block_size) for event in events if event.component == FULL]


def _told(event: CacheEvent, block_size: int) -> KvEvent:
    hashes = [
        event.keys[at : at + PAGE_KEY_BYTES] for at in range(0, len(event.keys), PAGE_KEY_BYTES)
    ]
    medium = MEDIA[event.tier]
    if event.kind is EventKind.REMOVED:
        return BlockRemoved(hashes, medium)
    tokens = np.frombuffer(event.tokens, dtype="<i4").tolist()
    return BlockStored(hashes, event.parent or None, tokens, block_size, None, medium, None)
