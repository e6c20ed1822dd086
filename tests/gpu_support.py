"""The rule for half precision of docs/precision.md: answers against stock transformers' logits."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Tokens = Sequence[int]


def largest_gap(
    directory: Path, prompts: Sequence[Tokens], answers: Sequence[Tokens], device: str = "cuda"
) -> float:
    """How far any token is from what stock transformers would have picked, in logits; the whole
    sequence in one go, in float32."""
    truth = reference(directory, prompts, answers, "float32", device)
    gaps = [
        logits.max(-1).values - logits[range(len(tokens)), list(tokens)]
        for logits, tokens in zip(truth, answers, strict=True)
    ]
    return max(float(gap.max()) for gap in gaps)


def noise(
    directory: Path,
    prompts: Sequence[Tokens],
    answers: Sequence[Tokens],
    dtype: str,
    device: str = "cuda",
) -> float:
    """The largest difference between stock transformers' logits in this dtype and in float32."""
    there = reference(directory, prompts, answers, dtype, device)
    truth = reference(directory, prompts, answers, "float32", device)
    return max(float((a - b).abs().max()) for a, b in zip(there, truth, strict=True))


def reference(
    directory: Path,
    prompts: Sequence[Tokens],
    answers: Sequence[Tokens],
    dtype: str,
    device: str,
) -> list[torch.Tensor]:
    """Stock transformers' logits of every token of the answers, on the weights as stored."""
    model = _stock(directory, dtype, device)
    found = []
    for prompt, tokens in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        found.append(logits.float())
    return found


@functools.cache
def _stock(directory: Path, dtype: str, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    return model.to(device).eval()
