"""What a model answers without any of Quire: stock transformers, greedy, one chat at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from e2e.exactness.oracle import NOISE
from e2e.serving.client import Messages
from quire.models import load_model, load_tokenizer


@dataclass(frozen=True)
class Expected:
    text: str
    prompt_tokens: int
    prefixes: list[str]
    """The text before each token."""
    gaps: list[float]
    """How much likelier, in logits, each token was than the next best."""


class Oracle:
    def __init__(self, directory: Path) -> None:
        self._tokenizer = load_tokenizer(directory)
        self._model = load_model(
            directory, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa"
        )

    @torch.inference_mode()
    def chat(self, messages: Messages, num_tokens: int) -> Expected:
        tokenizer = self._tokenizer
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        tokens: list[int] = []
        gaps: list[float] = []
        past, step = None, torch.tensor([prompt])
        while len(tokens) < num_tokens:
            output = self._model(
                input_ids=step, past_key_values=past, use_cache=True, logits_to_keep=1
            )
            past = output.past_key_values
            best = output.logits[0, -1].topk(2)
            token = int(best.indices[0])
            gaps.append(float(best.values[0] - best.values[1]))
            if token == tokenizer.eos_token_id:
                break
            tokens.append(token)
            step = torch.tensor([[token]])
        prefixes = [tokenizer.decode(tokens[:i]) for i in range(len(gaps))]
        return Expected(tokenizer.decode(tokens), len(prompt), prefixes, gaps)


def check_same(text: str, expected: Expected) -> bool:
    """True: the same text. False: the first difference is fp32 noise. Raises otherwise.

    Where two tokens are as close as the last digits of a sum, either may win; see exactness.
    """
    if text == expected.text:
        return True
    common = [i for i, prefix in enumerate(expected.prefixes) if text.startswith(prefix)]
    gap = expected.gaps[common[-1]]
    print(f"differs after {expected.prefixes[common[-1]]!r}, logit gap {gap:.2e}")
    assert gap < NOISE, f"{text!r} instead of {expected.text!r}"
    return False
