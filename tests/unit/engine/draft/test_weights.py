"""Heads on disk: read as they are published, refused with the reason where they do not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

pytest.importorskip("transformers")

from quire.engine.draft.eagle import EagleHead, usual_layers
from quire.engine.draft.headweights import (
    DraftTarget,
    assemble,
    expected,
    read_spec,
    read_tensors,
    vocabulary_tensors,
)
from quire.errors import ConfigError

TARGET = DraftTarget(hidden_size=16, vocab_size=50, num_layers=12, num_kv_heads=2, head_dim=8)
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "vocab_size": 50,
    "draft_vocab_size": 10,
    "torch_dtype": "bfloat16",
}
TOKENS = torch.tensor([0, 1, 5, 7, 11, 20, 21, 33, 48, 49])


def published(folder, without=(), leave_out=(), replaced=None, **changes):
    """A head as others write it, with an LM head of its own."""
    folder.mkdir(exist_ok=True)
    config = {k: v for k, v in (CONFIG | changes).items() if k not in without}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "reference").mkdir(exist_ok=True)
    (folder / "reference" / "config.json").write_text(json.dumps(CONFIG))
    chance = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=chance)
        for name, shape, _ in expected(read_spec(folder / "reference", TARGET))
        if name.endswith("weight") and name != "embed_tokens.weight"
    }
    tensors |= vocabulary_tensors(TOKENS, 50) | (replaced or {})
    save_file({n: t for n, t in tensors.items() if n not in leave_out},
              str(folder / "model.safetensors"))  # fmt: skip
    return folder


def loaded(folder):
    spec = read_spec(folder, TARGET)
    embedding, lm_head = torch.randn(50, 16), torch.randn(50, 16)
    return spec, assemble(spec, read_tensors(folder, spec), embedding, lm_head), embedding, lm_head


def test_a_published_head_is_read(tmp_path):
    spec, weights, embedding, _ = loaded(published(tmp_path))
    stored = load_file(str(tmp_path / "model.safetensors"))
    assert spec.layers == (1, 5, 8) == usual_layers(12)
    assert weights.draft_tokens.tolist() == TOKENS.tolist()
    assert torch.equal(weights.lm_head, stored["lm_head.weight"])
    assert weights.embedding is embedding
    assert torch.equal(weights.qkv[:32], stored["midlayer.self_attn.q_proj.weight"])
    assert torch.equal(weights.gate_up[24:], stored["midlayer.mlp.up_proj.weight"])


def test_without_an_lm_head_the_targets_rows_are_used(tmp_path):
    _, weights, _, lm_head = loaded(published(tmp_path, leave_out={"lm_head.weight"}))
    assert torch.equal(weights.lm_head, lm_head[TOKENS])


def test_a_head_may_bring_its_own_embedding_and_the_whole_vocabulary(tmp_path):
    own = torch.randn(50, 16)
    more = {"embed_tokens.weight": own, "lm_head.weight": torch.randn(50, 16)}
    folder = published(
        tmp_path, without={"draft_vocab_size"}, leave_out={"d2t", "t2d"}, replaced=more
    )
    _, weights, _, _ = loaded(folder)
    assert torch.equal(weights.embedding, own)
    assert weights.draft_tokens is None


def test_the_layers_it_was_trained_on_are_those_it_names(tmp_path):
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 11]}}
    assert read_spec(published(tmp_path, **named), TARGET).layers == (0, 3, 11)


@torch.no_grad()
def test_one_position_is_computed_as_the_format_means_it(tmp_path):
    """Written out with the published names, for a row that sees only itself."""
    spec, weights, embedding, _ = loaded(published(tmp_path))
    w = load_file(str(tmp_path / "model.safetensors"))
    features, token = torch.randn(1, 48), torch.tensor([7])

    def norm(x, name):
        return functional.rms_norm(x, (16,), w[f"{name}.weight"], eps=1e-5)

    hidden = features @ w["fc.weight"].T
    both = torch.cat(
        (norm(embedding[token], "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")),
        -1,
    )
    value = (both @ w["midlayer.self_attn.v_proj.weight"].T).view(2, 8)
    found = value.repeat_interleave(2, 0).view(1, 32)
    hidden = hidden + found @ w["midlayer.self_attn.o_proj.weight"].T
    normed = norm(hidden, "midlayer.post_attention_layernorm")
    gate = functional.silu(normed @ w["midlayer.mlp.gate_proj.weight"].T)
    inner = gate * (normed @ w["midlayer.mlp.up_proj.weight"].T)
    hidden = hidden + inner @ w["midlayer.mlp.down_proj.weight"].T
    logits = norm(hidden, "norm") @ w["lm_head.weight"].T

    head = EagleHead(spec, weights)
    step = head.step(
        head.fused(features),
        token,
        torch.tensor([3]),
        lambda heads: heads.value.repeat_interleave(2, 0).transpose(0, 1).flatten(1),
    )
    torch.testing.assert_close(step.hidden, hidden)
    torch.testing.assert_close(head.logits(step.normed), logits)
    draft = head.logits(step.normed).argmax(-1)
    assert head.proposed(draft).tolist() == [TOKENS[int(draft)].item()]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 32}, "hidden size is 32 and the model's 16"),
        ({"target_hidden_size": 64}, "hidden size of the target is 64"),
        ({"vocab_size": 51}, "vocabulary is 51"),
        ({"num_key_value_heads": 4}, "number of key-value heads is 4 and the model's 2"),
        ({"head_dim": 4}, "head size is 4 and the model's 8"),
        ({"draft_vocab_size": 60}, "larger than the vocabulary"),
        ({"architectures": ["LlamaForCausalLM"]}, "no EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "several layers"),
        ({"hidden_act": "gelu"}, "uses gelu"),
        ({"attention_bias": True}, "biases"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "position embedding"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "outside eagle_config"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 12]}}, "layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "layers"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        read_spec(published(tmp_path, **changes), TARGET)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "rms_norm_eps"])
def test_what_a_configuration_does_not_say_is_named(tmp_path, name):
    with pytest.raises(ConfigError, match=name):
        read_spec(published(tmp_path, without={name}), TARGET)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"leave_out": {"fc.weight"}}, "has no fc.weight"),
        ({"leave_out": {"d2t"}}, "has no d2t"),
        ({"replaced": {"fc.weight": torch.zeros(16, 32)}}, r"fc.weight is \[16, 32\]"),
        ({"replaced": {"norm.weight": torch.zeros(16, dtype=torch.int8)}}, "stored as I8"),
    ],
)
def test_weights_that_are_missing_or_wrong_are_named(tmp_path, changes, reason):
    folder = published(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reason):
        read_tensors(folder, read_spec(folder, TARGET))


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    offsets = torch.full((10,), 45)
    with pytest.raises(ConfigError, match="d2t"):
        loaded(published(tmp_path, replaced={"d2t": offsets}))


def test_weights_in_other_formats_are_refused(tmp_path):
    folder = published(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    spec = read_spec(folder, TARGET)
    with pytest.raises(ConfigError, match="safetensors"):
        read_tensors(folder, spec)


def test_an_empty_folder_is_no_head(tmp_path):
    with pytest.raises(ConfigError, match="no draft head"):
        read_spec(tmp_path, TARGET)
