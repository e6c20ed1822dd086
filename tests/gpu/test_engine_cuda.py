"""The engine on CUDA, on a small random Llama: every tier gives the same tokens."""

import numpy as np
import pytest
import torch

from gpu_support import answer, largest_gap, noise
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.types import Tier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
NUM_TOKENS = 24
PAGES = 256
NOISE = 1e-3


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 4096, 300).tolist()
    tails = [rng.integers(0, 4096, n).tolist() for n in (1, 15, 16, 17, 400)]
    return [shared + tail for tail in tails]


def build(directory, tmp_path, dtype: str):
    layout_bytes = 6 * 2 * 16 * 2 * 64 * (4 if dtype == "float32" else 2)
    return build_engine(
        EngineConfig(
            model=str(directory),
            name="tiny",
            device="cuda",
            dtype=dtype,
            device_bytes=PAGES * layout_bytes,
            host_bytes=2 * PAGES * layout_bytes,
            store=f"file://{tmp_path}/store?max=1GiB",
            prefetch_threshold=16,
            debug=True,
        )
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_tier_gives_the_same_tokens_c32(directory, tmp_path, dtype):
    engine = build(directory, tmp_path, dtype)
    try:
        cold = answer(engine, prompts(), "cold", NUM_TOKENS)
        device = answer(engine, prompts(), "device", NUM_TOKENS)
        engine.manager.flush(Tier.DEVICE)
        host = answer(engine, prompts(), "host", NUM_TOKENS)
        assert engine.manager.counters.loaded_pages > 0
        engine.manager.flush(Tier.DEVICE)
        engine.manager.flush(Tier.HOST)
        store = answer(engine, prompts(), "store", NUM_TOKENS)
        assert engine.manager.counters.fetched_pages > 0
    finally:
        engine.close()
    # Up to the first token the same bytes meet the same shapes: equal to the bit, whatever the
    # type. After it, the page in which prompt and answer meet may be either request's.
    for found in (host, store):
        assert [tokens[0] for tokens in found] == [tokens[0] for tokens in device]
    # The rule of docs/precision.md; the weights were stored in float32, so rounding them is noise.
    allowed = NOISE if dtype == "float32" else 2 * noise(directory, prompts(), cold, dtype)
    for answers in (cold, device, host, store):
        assert largest_gap(directory, prompts(), answers) < allowed
