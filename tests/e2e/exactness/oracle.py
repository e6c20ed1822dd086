"""What the model answers without any of Quire: stock transformers, its own attention and cache.

Greedy, one prompt at a time. For every step it keeps the logits, so that a difference can be
explained: two ways to compute the same sum in fp32 differ in the last digits, and where two tokens
are that close either may win. Everything else is a bug.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from quire.models import embedded_model, load_model, load_tokenizer

ROOT = Path(__file__).parents[3]
NOISE = 1e-3
"""Logits differ by less than this, between chunk sizes, batches and ranks, in fp32. Measured: up
to 2e-4; logits of this model reach 30."""
NUM_TOKENS = 12


def prompts() -> list[list[int]]:
    """Real text: chat, a document asked about twice, code, a second turn, another language."""
    tokenizer = load_tokenizer(embedded_model())
    document = (ROOT / "docs/embedding.md").read_text()[:1500]
    code = (ROOT / "src/quire/units.py").read_text()[:700]
    turns = [
        [("user", "Write three sentences about the sea, the wind and the harbour.")],
        [("user", f"{document}\n\nWhich call may block?")],
        [("user", f"{document}\n\nWhat must an engine do when a load has failed?")],
        [("user", f"Explain this code.\n```python\n{code}\n```")],
        [
            ("user", "Name two rivers in France."),
            ("assistant", "The Loire and the Rhône."),
            ("user", "Which of them is longer, and through which towns does it flow?"),
        ],
        [("user", "Erzähle mir in wenigen Sätzen, wie ein Buch gebunden wird.")],
    ]
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": role, "content": text} for role, text in turn],
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        for turn in turns
    ]


@dataclass(frozen=True)
class Reference:
    prompt: list[int]
    tokens: list[int]
    logits: list[torch.Tensor]
    """Per step, [vocabulary]."""


@cache
def references() -> list[Reference]:
    model = load_model(
        embedded_model(), dtype=torch.float32, device=torch.device("cpu"), attention="sdpa"
    )
    return [_answer(model, prompt) for prompt in prompts()]


@torch.inference_mode()
def _answer(model: torch.nn.Module, prompt: list[int]) -> Reference:
    tokens: list[int] = []
    logits: list[torch.Tensor] = []
    past = None
    step = torch.tensor([prompt])
    for _ in range(NUM_TOKENS):
        output = model(input_ids=step, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = output.past_key_values
        logits.append(output.logits[0, -1].clone())
        tokens.append(int(logits[-1].argmax()))
        step = torch.tensor([[tokens[-1]]])
    return Reference(prompt, tokens, logits)


def differences(reference: Reference, tokens: list[int]) -> int:
    """0 if equal, 1 if the first difference is fp32 noise (which is printed); raises otherwise."""
    assert len(tokens) == len(reference.tokens)
    for step, (mine, theirs) in enumerate(zip(tokens, reference.tokens, strict=True)):
        if mine != theirs:
            logits = reference.logits[step]
            gap = float(logits[theirs] - logits[mine])
            print(f"token {step}: {mine} instead of {theirs}, logit gap {gap:.2e}")
            assert gap < NOISE, f"{tokens} instead of {reference.tokens}: gap {gap:.2e} at {step}"
            return 1  # what follows answers another prompt
    return 0
