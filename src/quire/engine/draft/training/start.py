"""A head to begin with: which tokens it may propose, and its weights before the first step.

It begins as the high layer's output passed on to the target's own last norm and LM head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from quire.engine.draft.eagle import EagleSpec
from quire.engine.draft.headweights import LM_HEAD, expected, vocabulary_tensors
from quire.engine.draft.training.examples import Example
from quire.engine.draft.training.target import TeacherModel
from quire.engine.forward.rope import rope_of
from quire.engine.forward.spec import DenseSpec
from quire.errors import ConfigError

_SPREAD = 0.02
_SMALL_SPREAD = 0.002
"""Of what is added to the hidden state, or mixed into it."""
_NORM_OFFSETS = {"gemma3_text": 1.0}
"""Families that store their norms' weights less so much."""


def new_spec(
    teacher: TeacherModel, layers: tuple[int, int, int], mlp_size: int, draft_vocab_size: int
) -> EagleSpec:
    """Raises ConfigError."""
    shape, text = teacher.shape, teacher.text
    if not all(0 <= layer < shape.num_layers for layer in layers):
        raise ConfigError(f"--layers must be among the model's: 0 to {shape.num_layers - 1}")
    decoder = DenseSpec(
        num_layers=1,
        hidden_size=shape.hidden_size,
        mlp_size=mlp_size,
        num_q_heads=teacher.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        activation="silu",
        norm_eps=text.rms_norm_eps,
        scaling=shape.head_dim**-0.5,
        ropes=(rope_of(positions_of(teacher), shape.head_dim),),
        windows=(None,),
        is_tied=False,
    )
    return EagleSpec(decoder, layers, min(draft_vocab_size, shape.vocab_size))


def positions_of(teacher: TeacherModel) -> Any:
    """A configuration with the positions of the target's layers that see everything."""
    from transformers import LlamaConfig

    text = teacher.text
    parameters = text.rope_parameters
    return LlamaConfig(
        hidden_size=teacher.shape.hidden_size,
        num_attention_heads=teacher.num_q_heads,
        head_dim=teacher.shape.head_dim,
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=dict(parameters.get("full_attention", parameters)),
    )


def likeliest_tokens(examples: Iterable[Example], spec: EagleSpec) -> torch.Tensor:
    """The draft vocabulary, ascending: what is to be predicted most often."""
    size, vocab_size = spec.draft_vocab_size, spec.decoder.vocab_size
    learned = torch.cat([example.tokens[example.start :] for example in examples])
    counts = torch.bincount(learned.long(), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def coverage(examples: Iterable[Example], tokens: torch.Tensor) -> float:
    """Share of what is to be predicted that can be proposed."""
    learned = torch.cat([example.tokens[example.start :] for example in examples])
    return float(torch.isin(learned.long(), tokens).float().mean())


def first_weights(
    teacher: TeacherModel, spec: EagleSpec, tokens: torch.Tensor, *, own_lm_head: bool, seed: int
) -> dict[str, torch.Tensor]:
    """What is learned, in float32, on the host. Without an own LM head the target's is used."""
    chance = torch.Generator().manual_seed(seed)
    first: dict[str, torch.Tensor] = {}
    for name, shape, is_needed in expected(spec):
        if not is_needed or not name.endswith(".weight"):
            continue
        if len(shape) == 1:
            first[name] = torch.ones(shape)
        else:
            adds = name.startswith("fc") or "o_proj" in name or "down_proj" in name
            spread = _SMALL_SPREAD if adds else _SPREAD
            first[name] = torch.randn(shape, generator=chance).mul_(spread)
    hidden = spec.decoder.hidden_size
    first["fc.weight"][:, -hidden:] += torch.eye(hidden)
    last_norm = teacher.last_norm.detach().float().cpu()
    first["norm.weight"] = last_norm + _NORM_OFFSETS.get(teacher.text.model_type, 0.0)
    if own_lm_head:
        first[LM_HEAD] = teacher.lm_head.detach().float().cpu()[tokens]
    return first


def vocabulary_of(spec: EagleSpec, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Nothing where every token can be proposed."""
    if spec.draft_vocab_size == spec.decoder.vocab_size:
        return {}
    return vocabulary_tensors(tokens, spec.decoder.vocab_size)
