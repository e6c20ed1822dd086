"""Sharding: the ranks' parts together compute what the whole model computes."""

import dataclasses
import threading

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from quire.engine.parallel import head_share, shard, share
from quire.errors import ConfigError, ModelError
from quire.models import ModelShape
from thread_ranks import ThreadRanks


def shape(num_q_heads: int, num_kv_heads: int) -> ModelShape:
    return ModelShape(
        num_layers=2,
        num_kv_heads=num_kv_heads,
        num_q_heads=num_q_heads,
        head_dim=8,
        vocab_size=64,
        max_position_embeddings=128,
        architecture="test",
        num_parameters=0,
        weight_bytes=0,
        full_layers=(0, 1),
    )


def model(kind: str, num_q_heads: int, num_kv_heads: int):
    torch.manual_seed(0)
    options = {
        "vocab_size": 64,
        "hidden_size": 8 * num_q_heads,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": num_q_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 8,
    }
    if kind == "qwen2":  # has biases
        made = Qwen2ForCausalLM(Qwen2Config(**options))
    elif kind == "gemma3":  # has norms of queries and keys, and windows
        kinds = ["sliding_attention", "full_attention"]
        made = Gemma3ForCausalLM(Gemma3TextConfig(**options, layer_types=kinds, sliding_window=6))
    else:
        made = LlamaForCausalLM(LlamaConfig(**options, attention_bias=kind == "biased"))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.eval()


@pytest.mark.parametrize("kind", ["llama", "biased", "qwen2", "gemma3"])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "num_ranks"), [(9, 3, 2), (8, 4, 4)])
def test_the_parts_add_up_to_the_whole(kind, num_q_heads, num_kv_heads, num_ranks):
    tokens = torch.arange(20)[None] % 64
    with torch.inference_mode():
        whole = model(kind, num_q_heads, num_kv_heads)(input_ids=tokens).logits
    meeting = ThreadRanks(num_ranks)
    results: dict[int, torch.Tensor] = {}

    def run(rank: int, part) -> None:
        with torch.inference_mode():
            results[rank] = part(input_ids=tokens).logits

    threads = []
    for rank in range(num_ranks):
        part = model(kind, num_q_heads, num_kv_heads)
        shard(part, shape(num_q_heads, num_kv_heads), rank, num_ranks, meeting.add_up(rank))
        threads.append(threading.Thread(target=run, args=(rank, part)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(num_ranks):
        torch.testing.assert_close(results[rank], whole, rtol=1e-4, atol=1e-4)


def test_a_share_may_be_uneven_but_nothing_is_lost():
    assert [share(3, rank, 2) for rank in range(2)] == [(0, 1), (1, 3)]
    for total in range(1, 20):
        parts = [share(total, rank, 4) for rank in range(4)]
        assert [i for first, last in parts for i in range(first, last)] == list(range(total))


def test_more_ranks_than_heads_is_an_error_that_says_how_many():
    with pytest.raises(ConfigError, match="--tp 3 or less"):
        head_share(shape(9, 3), 0, 4)


def test_recurrent_layers_are_not_split():
    whole = dataclasses.replace(shape(8, 4), recurrent_layers=(0,))
    assert head_share(whole, 0, 1) == (0, 4)
    with pytest.raises(ConfigError, match="--tp 1"):
        head_share(whole, 0, 2)


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(ModelError, match="--tp 1"):
        shard(torch.nn.Linear(4, 4), shape(8, 4), 0, 2, lambda _: None)
