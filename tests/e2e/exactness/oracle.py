"""What the model answers without any of Quire: stock transformers, its own attention and cache.

Greedy, one prompt at a time. For every step it keeps the logits, so that a difference can be
explained: two ways to compute the same sum in fp32 differ in the last digits, and where two tokens
are that close either may win. Everything else is a bug. An answer's log probabilities are compared
too: a state that is slightly wrong often leaves the likeliest token where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from e2e.exactness.subjects import NOISE, SMOLLM2, Prompt, Subject
from quire.engine.messages import TokenLogprobs

__all__ = ["NOISE", "Answer", "Reference", "differences", "reference", "references", "stock_model"]


@dataclass(frozen=True)
class Answer:
    """What an engine answered."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    """Per token."""


@dataclass(frozen=True)
class Reference:
    prompt: Prompt
    tokens: list[int]
    logits: list[torch.Tensor]
    """Per step, [vocabulary]."""


@cache
def stock_model(subject: Subject) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        subject.find(), dtype=torch.float32, local_files_only=True
    )
    return model.eval()


def references(subject: Subject = SMOLLM2) -> list[Reference]:
    return [reference(subject, prompt) for prompt in subject.ask()]


def reference(subject: Subject, prompt: Sequence[int], num_tokens: int = 0) -> Reference:
    return _answer(subject, tuple(prompt), num_tokens or subject.num_tokens)


@cache
@torch.inference_mode()
def _answer(subject: Subject, prompt: tuple[int, ...], num_tokens: int) -> Reference:
    model = stock_model(subject)
    tokens: list[int] = []
    logits: list[torch.Tensor] = []
    past: Any = None
    step = torch.tensor([prompt])
    for _ in range(num_tokens):
        output = model(input_ids=step, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = output.past_key_values
        logits.append(output.logits[0, -1].clone())
        tokens.append(int(logits[-1].argmax()))
        step = torch.tensor([[tokens[-1]]])
    return Reference(list(prompt), tokens, logits)


def differences(reference: Reference, answer: Answer, *, noise: float = NOISE) -> int:
    """0 if equal, 1 if the first difference is fp32 noise (which is printed); raises otherwise."""
    tokens, expected = answer.tokens, reference.tokens
    assert len(tokens) == len(expected)
    for step, (mine, theirs) in enumerate(zip(tokens, expected, strict=True)):
        logits = reference.logits[step]
        gap = _likelihood_gap(logits, answer.logprobs[step], mine)
        if mine != theirs:
            gap = max(gap, float(logits[theirs] - logits[mine]))
            print(f"token {step}: {mine} instead of {theirs}, logit gap {gap:.2e}")
        assert gap < noise, f"{tokens} instead of {expected}: gap {gap:.2e} at {step}"
        if mine != theirs:
            return 1  # what follows answers another prompt
    return 0


def _likelihood_gap(logits: torch.Tensor, said: TokenLogprobs, token: int) -> float:
    """The largest difference between log probabilities said and computed."""
    known = logits.log_softmax(-1)
    ids = torch.tensor([token, *said.top_ids])
    return float((known[ids] - torch.tensor([said.logprob, *said.top_logprobs])).abs().max())
