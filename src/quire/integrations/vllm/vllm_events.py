"""What Quire's tiers hold, as vLLM's own events. Knows vLLM.

vLLM publishes them with those of its own blocks, to the same subscribers. A page is a block, its
key the block's hash: a chain of its own beside vLLM's, which tokens and parents make whole. Of
models with windows full pages are told of, without which nothing can be gone on from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)

from quire.manager import CacheEvent, EventKind
from quire.types import split_keys

_MEDIA = {"host": MEDIUM_CPU, "store": MEDIUM_STORAGE}


def told(events: Iterable[CacheEvent], block_size: int) -> Iterator[KVCacheEvent]:
    for event in events:
        if event.component != "full":
            continue  # a window has the keys of the full pages beside it
        hashes, medium = list(split_keys(event.keys)), _MEDIA[event.tier]
        if event.kind is EventKind.REMOVED:
            yield BlockRemoved(block_hashes=hashes, medium=medium)
            continue
        yield BlockStored(
            block_hashes=hashes,
            parent_block_hash=event.parent or None,
            token_ids=np.frombuffer(event.tokens, dtype="<i4").tolist(),
            block_size=block_size,
            lora_id=None,
            medium=medium,
            lora_name=None,
        )
