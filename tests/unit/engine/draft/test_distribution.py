"""Without a seed of the client's: what is drawn with proposals is distributed as the model says."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import random

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from small_engine import SmallEngine
from speculating import Eager, FixedPrices

VOCABULARY, TOP_K = 64, 6
CHI_SQUARE_5_AT_1_PERCENT = 15.086


def model_without_memory(path) -> torch.Tensor:
    """To it all tokens look alike, so that it draws from one distribution, which is returned."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = torch.randn(32)
        model.lm_head.weight.mul_(10)
    model.save_pretrained(path)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        logits = loaded(torch.tensor([[1, 2, 3]])).logits[0, -1].double()
    top = logits.topk(TOP_K)
    shares = torch.zeros(VOCABULARY, dtype=torch.float64)
    shares[top.indices] = top.values.softmax(-1)
    return shares


@pytest.mark.long
def test_twenty_thousand_draws_pass_a_chi_square_test(tmp_path) -> None:
    shares = model_without_memory(tmp_path / "model")
    counts = torch.zeros(VOCABULARY, dtype=torch.float64)
    chance = random.Random(11)
    options = {"draft_tokens": 3, "max_running": 32, "chunk_tokens": 256, "debug": False}
    with SmallEngine(tmp_path / "model", speculate="ngram", **options) as engine:
        speculation = engine.engine.scheduler.drafting.speculation
        speculation.prices, speculation.new_length = FixedPrices(), Eager
        asked = [
            engine.ask(
                [i % VOCABULARY],
                max_tokens=200,
                temperature=1.0,
                top_k=TOP_K,
                seed=chance.randrange(1 << 62),
            )
            for i in range(100)
        ]
        engine.run()
        for request in asked:
            counts += torch.bincount(torch.tensor(engine.tokens(request)), minlength=VOCABULARY)
        assert sum(speculation.counters.accepted) > 1000, "proposals had no part in it"
    assert counts.sum() == 20_000
    assert counts[shares == 0].sum() == 0
    expected = shares * 20_000
    found = ((counts - expected) ** 2 / expected)[shares > 0].sum()
    assert found < CHI_SQUARE_5_AT_1_PERCENT
