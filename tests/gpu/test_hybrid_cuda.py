"""Hybrid models on CUDA, tiny and random: every tier gives the tokens of stock transformers."""

import numpy as np
import pytest
import torch

from hybrid_models import TINY, VOCABULARY
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.messages import Generate, Outputs, SamplingParams
from quire.manager.costs import CostModel
from quire.types import RequestId, Tier

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


def answer(engine: Engine, which: str) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    asked = prompts()
    for i, prompt in enumerate(asked):
        tokens = np.array(prompt, dtype="<i4").tobytes()
        engine.handle(Generate(RequestId(f"{which}-{i}"), tokens, params))
    found: dict[str, list[int]] = {}
    finished = 0
    while finished < len(asked):
        engine.step()
        for message in engine.take_messages():
            for output in message.outputs if isinstance(message, Outputs) else []:
                assert not output.error
                found.setdefault(output.id, []).extend(output.tokens)
                finished += output.finish is not None
    while not engine.manager.idle:
        engine.step()
    return [found[f"{which}-{i}"] for i in range(len(asked))]


@pytest.mark.parametrize("name", TINY)
def test_every_tier_gives_the_same_tokens_c32(name, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(CostModel, "worth_fetching", lambda _self, _pages: True)
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
        answers = {"cold": answer(engine, "cold"), "device": answer(engine, "device")}
        engine.manager.flush(Tier.DEVICE)
        answers["host"] = answer(engine, "host")
        assert engine.manager.counters.loaded_pages > 0
        engine.manager.flush(Tier.DEVICE)
        engine.manager.flush(Tier.HOST)
        answers["store"] = answer(engine, "store")
        assert engine.manager.counters.fetched_pages > 0
    finally:
        engine.close()
    for tier, tokens in answers.items():
        gap = largest_gap(directory, tokens)
        print(f"{name}, {tier}: largest logit gap {gap:.1e}")
        assert gap < NOISE, tier


def largest_gap(directory, answers: list[list[int]]) -> float:
    """How far any token is from what stock transformers would have picked, in logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).cuda().eval()
    largest = 0.0
    for prompt, tokens in zip(prompts(), answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + tokens[:-1]], device="cuda")
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        gaps = logits.max(-1).values - logits[torch.arange(len(tokens)), tokens]
        largest = max(largest, float(gaps.max()))
    return largest
