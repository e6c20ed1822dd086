"""What the GPU tests share: an engine in this process that answers prompts, from whichever tier."""

from collections.abc import Sequence

import numpy as np
import torch

from quire.engine.engine import Engine
from quire.engine.messages import Generate, Outputs, SamplingParams
from quire.types import RequestId


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], which: str, num_tokens: int
) -> list[list[int]]:
    """Greedy, all at once; returns when nothing is in flight any more."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0)
    for i, prompt in enumerate(prompts):
        tokens = np.array(prompt, dtype="<i4").tobytes()
        engine.handle(Generate(RequestId(f"{which}-{i}"), tokens, params))
    found: dict[str, list[int]] = {}
    finished = 0
    while finished < len(prompts):
        engine.step()
        for message in engine.take_messages():
            for output in message.outputs if isinstance(message, Outputs) else []:
                assert not output.error
                found.setdefault(output.id, []).extend(output.tokens)
                finished += output.finish is not None
    while not engine.manager.idle:
        engine.step()
    return [found[f"{which}-{i}"] for i in range(len(prompts))]


def largest_gap(
    directory, prompts: Sequence[Sequence[int]], answers: list[list[int]], device: str = "cuda"
) -> float:
    """How far any token is from what stock transformers would have picked, in logits; the whole
    sequence in one go, in float32."""
    gaps = [
        logits.max(-1).values - logits[range(len(tokens)), tokens]
        for logits, tokens in zip(
            reference(directory, prompts, answers, "float32", device), answers, strict=True
        )
    ]
    return max(float(gap.max()) for gap in gaps)


def noise(
    directory,
    prompts: Sequence[Sequence[int]],
    answers: list[list[int]],
    dtype: str,
    device: str = "cuda",
) -> float:
    """The largest difference between stock transformers' logits in this dtype and in float32."""
    there = reference(directory, prompts, answers, dtype, device)
    truth = reference(directory, prompts, answers, "float32", device)
    return max(float((a - b).abs().max()) for a, b in zip(there, truth, strict=True))


def reference(
    directory, prompts: Sequence[Sequence[int]], answers: list[list[int]], dtype: str, device: str
) -> list[torch.Tensor]:
    """Stock transformers' logits of every token of the answers, on the weights as stored."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model = model.to(device).eval()
    found = []
    for prompt, tokens in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        found.append(logits.float())
    return found
