"""What the GPU tests share: an engine in this process that answers prompts, from whichever tier."""

from collections.abc import Sequence

import numpy as np

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


def largest_gap(directory, prompts: Sequence[Sequence[int]], answers: list[list[int]]) -> float:
    """How far any token is from what stock transformers would have picked, in logits; the whole
    sequence in one go, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).cuda().eval()
    largest = 0.0
    for prompt, tokens in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *tokens[:-1]]], device="cuda")
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        gaps = logits.max(-1).values - logits[torch.arange(len(tokens)), tokens]
        largest = max(largest, float(gaps.max()))
    return largest
