"""Random models have no text that anybody could foresee: so an acceptance is imposed on them.

A head of random weights computes as much as a trained one. `Imposed` stands between an engine and
its ranks: of the tokens proposed it lets through as many as chance says, whatever the model said.
The answers are noise; what steps cost is not.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from quire.engine.batch import Batch, BatchResult, Segment, SegmentResult
from quire.engine.draft.headweights import (
    ARCHITECTURE,
    EMBEDDING,
    MEMBERS,
    OFFSETS,
    WEIGHTS_NAME,
    draft_target,
    expected,
    read_spec,
)
from quire.engine.executor import Executor
from quire.engine.sampling import Sampled
from quire.models import describe, read_config
from quire.models.weights import CONFIG_NAME
from quire.store.account import StoreAccount
from quire.worker import WorkerGroup

_STD = 0.02


def write_random_head(directory: Path, model: Path, *, draft_vocab_size: int = 32_000) -> None:
    """For the model there, as large as published ones are."""
    from safetensors.torch import save_file

    shape, text = describe(model), read_config(model).get_text_config()
    vocabulary = min(draft_vocab_size, shape.vocab_size)
    fields = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": shape.num_q_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": text.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": 10_000.0,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": vocabulary,
    }
    directory.mkdir(parents=True)
    (directory / CONFIG_NAME).write_text(json.dumps(fields))
    spec = read_spec(directory, draft_target(shape, text.hidden_size))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, size, _ in expected(spec):
        if name == OFFSETS:
            tensors[name] = torch.zeros(size, dtype=torch.int64)
        elif name not in (EMBEDDING, MEMBERS):
            value = torch.ones(size)
            if len(size) > 1:
                value = torch.randn(size, generator=generator).mul_(_STD)
            tensors[name] = value.bfloat16()
    save_file(tensors, str(directory / WEIGHTS_NAME))


class Imposed:
    """An Executor around another."""

    def __init__(self, ranks: Executor, rate: float, seed: int = 0) -> None:
        """`rate`: share of proposals let through, given that those before were."""
        self._ranks = ranks
        self._rate = rate
        self._chance = np.random.default_rng(seed)
        self._launched: deque[Batch] = deque()

    @property
    def workers(self) -> WorkerGroup:
        return self._ranks.workers

    @property
    def overlaps(self) -> bool:
        return self._ranks.overlaps

    def launch(self, batch: Batch) -> None:
        self._ranks.launch(batch)
        self._launched.append(batch)

    def collect(self, meanwhile: Callable[[], None]) -> BatchResult:
        batch = self._launched.popleft()
        result = self._ranks.collect(meanwhile)
        pairs = zip(batch.segments, result.results, strict=True)
        return BatchResult(result.number, [self._let_through(s, r) for s, r in pairs])

    def _let_through(self, segment: Segment, result: SegmentResult) -> SegmentResult:
        if not segment.drafts or result.sampled is None:
            return result
        count = 0
        while count < segment.drafts and self._chance.random() < self._rate:
            count += 1
        kept = [Sampled(token) for token in segment.proposed[:count]]
        first, *further = [*kept, result.sampled]
        return msgspec.structs.replace(result, sampled=first, further=further)

    def self_check(self) -> str:
        return self._ranks.self_check()

    def store_account(self) -> StoreAccount:
        return self._ranks.store_account()

    def close(self) -> None:
        self._ranks.close()
