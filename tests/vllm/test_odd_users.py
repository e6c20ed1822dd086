"""Users with other options and habits: greedy tokens are still those of vLLM alone with the same.

What is asked is asked in two lives on one store, so that hits come from the host and from there.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_engines import (
    FORGET,
    LONG,
    MANY,
    SETTLE,
    Engines,
    Step,
    Subject,
    ask,
    is_clean,
    whole_pages,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "blocks of 64": {"block_size": 64},
    "blocks of 128": {"block_size": 128},
    "no prefix caching": {"enable_prefix_caching": False},
    "chunks of 33": {"max_num_batched_tokens": 33, "max_num_seqs": 16},
    "one at a time": {"max_num_seqs": 1},
    "steps overlap, memory is tiny": {
        "async_scheduling": True, "num_gpu_blocks_override": 24, "max_model_len": 640,
        "max_num_seqs": 8,
    },
    "priorities": {"scheduling_policy": "priority", "num_gpu_blocks_override": 30,
                   "max_model_len": 640},
    "tokens are guessed": {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
        }
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_options(engines: Engines, small: Subject, tmp_path: Path, name: str) -> None:
    llm = OPTIONS[name]
    long, many = engines.vllm(small.model, [ask(LONG), ask(*MANY)], llm=llm)
    for _ in range(2):
        steps = [ask(LONG), ask(*MANY), FORGET, ask(LONG), FORGET, ask(*MANY), SETTLE]
        first, all_first, _, again, _, all_again, end = engines.quire(
            small.model, steps, f"file://{tmp_path}?max=1GiB", llm=llm
        )
        assert first["tokens"] == again["tokens"] == long["tokens"]
        assert all_first["tokens"] == all_again["tokens"] == many["tokens"]
        assert again["cached"][0] >= 512
        assert is_clean(end)


@pytest.mark.long
def test_a_host_that_holds_less_than_one_prompt(
    engines: Engines, small: Subject, tmp_path: Path
) -> None:
    for _ in range(2):
        steps = [ask(LONG), ask(*MANY), FORGET, ask(LONG), ask(*MANY), SETTLE]
        first, many, _, again, many_again, end = engines.quire(
            small.model, steps, f"file://{tmp_path}?max=1GiB", extra={"host_memory": "6MiB"}
        )
        assert first["tokens"] == again["tokens"] == small.long
        assert many["tokens"] == many_again["tokens"] == small.many
        assert is_clean(end)


def test_requests_given_up_a_store_that_vanishes_and_a_reset_while_they_run(
    engines: Engines, small: Subject, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    abandon: Step = {"do": "abandon", "prompts": [LONG, *MANY[:7]], "after_steps": [*range(8)]}
    dice = {"n": 3, "temperature": 1.0, "seed": 7}
    drawn = ask(LONG, sampling=dice)
    (alone,) = engines.vllm(small.model, [drawn])
    steps: list[Step] = [ask(LONG), ask(*MANY), FORGET, abandon, SETTLE, FORGET, drawn, FORGET]
    steps += [{"do": "remove", "folder": str(folder)}, ask(*MANY), FORGET, ask(LONG), SETTLE]
    steps += [{"do": "reset_running", "prompts": MANY, "max_tokens": 12}, SETTLE]
    found = engines.quire(small.model, steps, f"file://{folder}?max=1GiB")
    one, many, _, given_up, settled, _, several, _, _, all_again, _, again, end, anew, last = found
    assert one["tokens"] == again["tokens"] == small.long
    assert many["tokens"] == all_again["tokens"] == anew["tokens"] == small.many
    assert several["tokens"] == alone["tokens"]
    assert "WAITING_FOR_REMOTE_KVS" in given_up["states"], "one was to be given up while it loads"
    assert again["cached"] == [whole_pages(LONG)], "from the host"
    assert anew["ok"]
    for at_rest in (settled, end, last):
        assert is_clean(at_rest)


@pytest.mark.long
def test_an_adapter_trained_again_to_the_same_place(
    engines: Engines, small: Subject, tmp_path: Path
) -> None:
    store, folder = f"file://{tmp_path / 'store'}?max=1GiB", tmp_path / "adapter"
    with_adapters = {"enable_lora": True, "max_lora_rank": 8}
    question = ask(LONG, adapter=str(folder))
    answers = []
    for seed in (1, 2):
        train(Path(small.model), folder, seed)
        alone, plain = engines.vllm(small.model, [question, ask(LONG)], llm=with_adapters)
        steps = [question, FORGET, question, ask(LONG), SETTLE]
        first, _, again, bare, end = engines.quire(small.model, steps, store, llm=with_adapters)
        assert first["tokens"] == again["tokens"] == alone["tokens"]
        assert first["cached"] == [0], "nothing of the adapter that was there before"
        assert again["cached"] == [whole_pages(LONG)]
        assert bare["tokens"] == plain["tokens"] == small.long
        assert is_clean(end)
        (after,) = engines.quire(small.model, [question], store, llm=with_adapters)
        assert after["tokens"] == alone["tokens"]
        assert after["cached"] == [whole_pages(LONG)], "from the store"
        answers.append(alone["tokens"])
    assert answers[0] != answers[1], "these adapters should have made a difference"


def train(model: Path, folder: Path, seed: int) -> None:
    """An adapter of the attention's projections, of chance."""
    config = json.loads((model / "config.json").read_text())
    wide, heads, dim = config["hidden_size"], config["num_key_value_heads"], config["head_dim"]
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for part, out in (("q_proj", wide), ("v_proj", heads * dim)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, wide, generator=chance) * 0.05
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, 8, generator=chance) * 0.05
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}
    described["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(described))


@pytest.fixture
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    others = Engines(tmp_path_factory.mktemp("others"))
    yield others
    others.close()


@pytest.mark.long
def test_two_engines_on_one_store_at_once(
    engines: Engines, others: Engines, small: Subject, tmp_path: Path
) -> None:
    store = f"file://{tmp_path}?max=1GiB"
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            steps = [ask(LONG), ask(*MANY), FORGET, ask(LONG), ask(*MANY), SETTLE]
            runs = [
                threads.submit(one.quire, small.model, list(map(dict, steps)), store)
                for one in (engines, others)
            ]
            for run in runs:
                first, many, _, again, many_again, end = run.result()
                assert first["tokens"] == again["tokens"] == small.long
                assert many["tokens"] == many_again["tokens"] == small.many
                assert is_clean(end)
