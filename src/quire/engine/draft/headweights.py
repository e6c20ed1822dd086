"""EAGLE-3 heads on disk, as they are published: model.safetensors and config.json.

    fc.weight                                   [hidden, 3 × hidden]
    midlayer.hidden_norm.weight                 of the hidden state, before attention
    midlayer.input_layernorm.weight             of the token's embedding
    midlayer.self_attn.{q,k,v}_proj.weight      [heads × dim, 2 × hidden]: token first, then hidden
    midlayer.self_attn.o_proj.weight, midlayer.post_attention_layernorm.weight
    midlayer.mlp.{gate,up,down}_proj.weight, norm.weight
    lm_head.weight      [draft vocabulary, hidden]; if missing: the target's rows of those tokens
    d2t                 [draft vocabulary], int64: what to add to a draft token to get the target's
    t2d                 [vocabulary], bool: which of the target's can be proposed; repeats d2t
    embed_tokens.weight [vocabulary, hidden]; usually missing: the target's

The engine keeps a head's keys and values as one more layer of its target's pages: key-value heads
and head size must be the target's. Whatever does not fit is refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.engine.draft.eagle import NUM_FEATURES, EagleSpec, EagleWeights, usual_layers
from quire.engine.forward.rope import refusal, rope_of
from quire.engine.forward.spec import DenseSpec
from quire.errors import ConfigError, ModelError
from quire.models import ModelShape
from quire.models.weights import CONFIG_NAME, StoredTensor, read_json, stored_tensors

WEIGHTS_NAME = "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
LM_HEAD, EMBEDDING, OFFSETS, MEMBERS = "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"
_READABLE = {"F32", "BF16", "F16"}
_ACTIVATION = "silu"

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """What a head must fit."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


def draft_target(shape: ModelShape, hidden_size: int) -> DraftTarget:
    return DraftTarget(
        hidden_size=hidden_size,
        vocab_size=shape.vocab_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )


def read_spec(directory: Path, target: DraftTarget) -> EagleSpec:
    """Raises ConfigError: it is no such head, or does not fit the target, and why."""
    fields = _fields(directory)
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    num_q_heads = fields["num_attention_heads"]
    num_kv_heads = fields.get("num_key_value_heads") or num_q_heads
    alike = (
        ("hidden size", fields["hidden_size"], target.hidden_size),
        ("hidden size of the target", fields.get("target_hidden_size"), target.hidden_size),
        ("vocabulary", fields["vocab_size"], target.vocab_size),
        ("number of key-value heads", num_kv_heads, target.num_kv_heads),
        ("head size", head_dim, target.head_dim),
    )
    for what, own, wanted in alike:
        if own is not None and own != wanted:
            raise ConfigError(
                f"the draft head in {directory} does not fit the model: its {what} is {own} and "
                f"the model's {wanted}; use a head made for this model"
            )
    draft_vocab_size = fields.get("draft_vocab_size") or target.vocab_size
    if draft_vocab_size > target.vocab_size:
        raise ConfigError(f"{directory}: draft_vocab_size is larger than the vocabulary")
    decoder = DenseSpec(
        num_layers=1,
        hidden_size=target.hidden_size,
        mlp_size=fields["intermediate_size"],
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        activation=_ACTIVATION,
        norm_eps=fields["rms_norm_eps"],
        scaling=head_dim**-0.5,
        ropes=(rope_of(_positions(directory, fields), head_dim),),
        windows=(None,),
        is_tied=False,
    )
    return EagleSpec(decoder, _layers(directory, fields, target), draft_vocab_size)


def read_tensors(directory: Path, spec: EagleSpec) -> dict[str, torch.Tensor]:
    """By name, on the host, as they are stored. Raises ConfigError unless all are there and of the
    right shape."""
    from safetensors.torch import load_file

    stored = _stored(directory)
    for name, shape, is_needed in expected(spec):
        if name not in stored:
            if is_needed:
                raise ConfigError(f"the draft head in {directory} has no {name}: get it again")
            continue
        tensor = stored[name]
        if tensor.shape != shape:
            raise ConfigError(
                f"the draft head in {directory} does not fit: {name} is {list(tensor.shape)}, and "
                f"its configuration and the model need {list(shape)}"
            )
        if name not in (OFFSETS, MEMBERS) and tensor.dtype not in _READABLE:
            raise ConfigError(f"{directory}: {name} is stored as {tensor.dtype}: use bfloat16")
    files = {tensor.file for tensor in stored.values()}
    return {name: tensor for file in files for name, tensor in load_file(str(file)).items()}


def assemble(
    spec: EagleSpec, tensors: Tensors, embedding: torch.Tensor, lm_head: torch.Tensor
) -> EagleWeights:
    """As the head computes with them. `embedding` and `lm_head` are the target's; device and dtype
    are the embedding's. Gradients find their way back to `tensors`."""
    device, dtype = embedding.device, embedding.dtype

    def get(*names: str) -> torch.Tensor:
        return torch.cat([tensors[f"{name}.weight"].to(device, dtype) for name in names])

    layer = "midlayer."
    draft_tokens = target_tokens(spec, tensors)
    if draft_tokens is not None:
        draft_tokens = draft_tokens.to(device)
    if LM_HEAD in tensors:
        lm_head = tensors[LM_HEAD].to(device, dtype)
    elif draft_tokens is not None:
        lm_head = lm_head[draft_tokens]
    return EagleWeights(
        embedding=tensors[EMBEDDING].to(device, dtype) if EMBEDDING in tensors else embedding,
        fc=get("fc"),
        hidden_norm=get(f"{layer}hidden_norm"),
        token_norm=get(f"{layer}input_layernorm"),
        qkv=get(*(f"{layer}self_attn.{name}_proj" for name in "qkv")),
        o=get(f"{layer}self_attn.o_proj"),
        mlp_norm=get(f"{layer}post_attention_layernorm"),
        gate_up=get(f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"),
        down=get(f"{layer}mlp.down_proj"),
        norm=get("norm"),
        lm_head=lm_head,
        draft_tokens=draft_tokens,
    )


def target_tokens(spec: EagleSpec, tensors: Tensors) -> torch.Tensor | None:
    """[draft vocabulary], int64; None: the draft's tokens are the target's. Raises ConfigError."""
    if OFFSETS not in tensors:
        return None
    offsets = tensors[OFFSETS]
    tokens = offsets.to(torch.int64) + torch.arange(len(offsets), device=offsets.device)
    if int(tokens.min()) < 0 or int(tokens.max()) >= spec.decoder.vocab_size:
        raise ConfigError("the draft head's d2t names tokens that the model does not have")
    return tokens


def vocabulary_tensors(tokens: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """d2t and t2d of these tokens of the target, ascending."""
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[tokens] = True
    return {OFFSETS: tokens - torch.arange(len(tokens)), MEMBERS: members}


def expected(spec: EagleSpec) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape and whether it must be there, of every tensor of a head."""
    decoder = spec.decoder
    hidden, mlp = decoder.hidden_size, decoder.mlp_size
    q, kv = decoder.num_q_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    is_reduced = spec.draft_vocab_size != decoder.vocab_size
    yield "fc.weight", (hidden, NUM_FEATURES * hidden), True
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        yield f"midlayer.{name}.weight", (hidden,), True
    for name, size in (("q", q), ("k", kv), ("v", kv)):
        yield f"midlayer.self_attn.{name}_proj.weight", (size, 2 * hidden), True
    yield "midlayer.self_attn.o_proj.weight", (hidden, q), True
    yield "midlayer.mlp.gate_proj.weight", (mlp, hidden), True
    yield "midlayer.mlp.up_proj.weight", (mlp, hidden), True
    yield "midlayer.mlp.down_proj.weight", (hidden, mlp), True
    yield "norm.weight", (hidden,), True
    yield LM_HEAD, (spec.draft_vocab_size, hidden), False
    yield EMBEDDING, (decoder.vocab_size, hidden), False
    yield OFFSETS, (spec.draft_vocab_size,), is_reduced
    yield MEMBERS, (decoder.vocab_size,), False


def save_head(directory: Path, spec: EagleSpec, tensors: Tensors, positions: Any) -> None:
    """`positions`: a configuration of transformers' that has them. Overwrites what is there."""
    from safetensors.torch import save_file

    decoder = spec.decoder
    rope = positions.rope_parameters
    scaled = {name: value for name, value in rope.items() if name != "rope_theta"}
    fields = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": decoder.hidden_size,
        "target_hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.mlp_size,
        "num_attention_heads": decoder.num_q_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": decoder.activation,
        "rms_norm_eps": decoder.norm_eps,
        "max_position_embeddings": positions.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaled,
        "vocab_size": decoder.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "tie_word_embeddings": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(spec.layers),
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_NAME).write_text(json.dumps(fields, indent=2) + "\n")
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(kept, str(directory / WEIGHTS_NAME))


def _fields(directory: Path) -> dict[str, Any]:
    """Of its configuration, as far as a head's must be there."""
    try:
        fields = read_json(directory / CONFIG_NAME)
    except ModelError as error:
        raise ConfigError(f"{directory} is no draft head: {error}") from error
    if ARCHITECTURE not in (fields.get("architectures") or ()):
        raise ConfigError(
            f"{directory} is no EAGLE-3 head: its architectures are "
            f"{fields.get('architectures')} and not {ARCHITECTURE}"
        )
    for name in ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size",
                 "rms_norm_eps"):  # fmt: skip
        if not isinstance(fields.get(name), int | float):
            raise ConfigError(f"{directory / CONFIG_NAME} does not say {name}: get it again")
    if fields.get("num_hidden_layers", 1) != 1:
        raise ConfigError(f"the draft head in {directory} has several layers: only one is known")
    if fields.get("hidden_act", _ACTIVATION) != _ACTIVATION:
        raise ConfigError(f"the draft head in {directory} uses {fields['hidden_act']}: not known")
    if fields.get("attention_bias") or fields.get("mlp_bias"):
        raise ConfigError(f"the draft head in {directory} has biases: not known")
    return fields


def _positions(directory: Path, fields: dict[str, Any]) -> Any:
    """Its configuration as transformers understands it, for rope.py."""
    from transformers import LlamaConfig

    config = LlamaConfig.from_dict(fields)
    if reason := refusal(config):
        raise ConfigError(f"the draft head in {directory} cannot be computed: {reason}")
    return config


def _layers(directory: Path, fields: dict[str, Any], target: DraftTarget) -> tuple[int, int, int]:
    name = "eagle_aux_hidden_state_layer_ids"
    if name in fields:
        raise ConfigError(
            f"{directory / CONFIG_NAME} has {name} outside eagle_config, where tools disagree from "
            "which number they count: move it into eagle_config, as layers counted from 0 whose "
            "outputs the head was trained on"
        )
    layers = (fields.get("eagle_config") or {}).get(name) or usual_layers(target.num_layers)
    if len(layers) != NUM_FEATURES or not all(
        isinstance(layer, int) and 0 <= layer < target.num_layers for layer in layers
    ):
        raise ConfigError(
            f"the draft head in {directory} looks at layers {list(layers)}: it must be "
            f"{NUM_FEATURES} of the model's {target.num_layers}"
        )
    low, middle, high = layers
    return low, middle, high


def _stored(directory: Path) -> dict[str, StoredTensor]:
    try:
        return stored_tensors(directory)
    except ModelError as error:
        raise ConfigError(f"{directory} is no draft head: {error}") from error
