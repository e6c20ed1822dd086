"""The engine on CUDA, on a small random Llama: every tier gives the same tokens."""

import numpy as np
import pytest
import torch

from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.engine.messages import Generate, Outputs, SamplingParams
from quire.types import RequestId, Tier

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


def answer(engine, which: str) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    asked = prompts()
    for i, prompt in enumerate(asked):
        tokens = np.array(prompt, dtype="<i4").tobytes()
        engine.handle(Generate(RequestId(f"{which}-{i}"), tokens, params))
    tokens: dict[str, list[int]] = {}
    finished = 0
    while finished < len(asked):
        engine.step()
        for message in engine.take_messages():
            for output in message.outputs if isinstance(message, Outputs) else []:
                assert not output.error
                tokens.setdefault(output.id, []).extend(output.tokens)
                finished += output.finish is not None
    while not engine.manager.idle:
        engine.step()
    return [tokens[f"{which}-{i}"] for i in range(len(asked))]


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
        cold = answer(engine, "cold")
        device = answer(engine, "device")
        engine.manager.flush(Tier.DEVICE)
        host = answer(engine, "host")
        assert engine.manager.counters.loaded_pages > 0
        engine.manager.flush(Tier.DEVICE)
        engine.manager.flush(Tier.HOST)
        store = answer(engine, "store")
        assert engine.manager.counters.fetched_pages > 0
    finally:
        engine.close()
    # Up to the first token the same bytes meet the same shapes: equal to the bit, whatever the
    # type. After it, the page in which prompt and answer meet may be either request's.
    for found in (host, store):
        assert [tokens[0] for tokens in found] == [tokens[0] for tokens in device]
    if dtype == "float32":
        for answers in (cold, device, host, store):
            assert_equal_but_for_noise(directory, answers)


def assert_equal_but_for_noise(directory, answers: list[list[int]]) -> None:
    """Against stock transformers, the whole sequence in one go."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).cuda().eval()
    noise = 0
    for prompt, tokens in zip(prompts(), answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + tokens[:-1]], device="cuda")
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 :]
        gaps = logits.max(-1).values - logits[torch.arange(len(tokens)), tokens]
        print(f"largest logit gap {float(gaps.max()):.2e}")
        assert float(gaps.max()) < NOISE
        noise += int((gaps > 0).sum())
    print(f"{noise} of {len(answers) * NUM_TOKENS} tokens differ by fp32 noise")
