"""Hybrid models on CUDA, tiny and random: every tier gives the tokens of stock transformers."""

import numpy as np
import pytest
import torch

from gpu_support import answer, largest_gap
from hybrid_models import TINY, VOCABULARY
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.manager.costs import CostModel
from quire.types import Tier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
NUM_TOKENS = 16
NOISE = 2e-3


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(3, VOCABULARY, 150).tolist()
    tails = [rng.integers(3, VOCABULARY, n).tolist() for n in (1, 15, 16, 17, 100)]
    return [shared + tail for tail in tails]


@pytest.mark.parametrize("name", TINY)
def test_every_tier_gives_the_same_tokens_c32(name, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(CostModel, "worth_fetching", lambda *_: True)
    directory = TINY[name](tmp_path / "model")
    engine = build_engine(
        EngineConfig(
            model=str(directory),
            name=name,
            device="cuda",
            device_bytes=64 << 20,
            host_bytes=64 << 20,
            store=f"file://{tmp_path}/store?max=1GiB",
            prefetch_threshold=16,
            debug=True,
        )
    )
    try:
        assert not engine.info.no_reuse
        answers = {
            "cold": answer(engine, prompts(), "cold", NUM_TOKENS),
            "device": answer(engine, prompts(), "device", NUM_TOKENS),
        }
        engine.manager.flush(Tier.DEVICE)
        answers["host"] = answer(engine, prompts(), "host", NUM_TOKENS)
        assert engine.manager.counters.loaded_pages > 0
        engine.manager.flush(Tier.DEVICE)
        engine.manager.flush(Tier.HOST)
        answers["store"] = answer(engine, prompts(), "store", NUM_TOKENS)
        assert engine.manager.counters.fetched_pages > 0
    finally:
        engine.close()
    for tier, tokens in answers.items():
        gap = largest_gap(directory, prompts(), tokens)
        print(f"{name}, {tier}: largest logit gap {gap:.1e}")
        assert gap < NOISE, tier
