"""Which models our own decoder computes; all others go on through transformers, and it is said."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from dense_models import DENSE, writer
from hybrid_models import TINY
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig, ForwardKind
from quire.engine.forward import choose
from quire.engine.forward.dense import DenseForward, load_dense
from quire.engine.forward.transformers import TransformersForward
from quire.errors import ConfigError
from unit.engine.hybrid_rank import stock_model
from unit.engine.test_build_hybrid import answer

AUTO, OWN, THEIRS = ForwardKind.AUTO, ForwardKind.DENSE, ForwardKind.TRANSFORMERS


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(directory, change):
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", DENSE)
def test_every_family_is_ours_unless_told_otherwise(name, tmp_path):
    directory = DENSE[name](tmp_path)
    assert choose(directory, AUTO) == choose(directory, OWN) == (OWN, "")
    assert choose(directory, THEIRS) == (THEIRS, "")


ODD = {
    "another kind": (TINY["falcon_h1"], "falcon_h1"),
    "activation": (writer("Llama", hidden_act="relu"), "activation is relu"),
    "part of a head": (
        writer(
            "Qwen3",
            rope_parameters={
                "rope_type": "linear",
                "rope_theta": 100.0,
                "factor": 2.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        "partial_rotary_factor",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_it_cannot_compute_goes_to_transformers_with_the_reason(name, tmp_path):
    write, reason = ODD[name]
    directory = write(tmp_path)
    kind, said = choose(directory, AUTO)
    assert kind is THEIRS
    assert reason in said
    with pytest.raises(ConfigError, match=r"forward is dense, but .*: set it to auto"):
        choose(directory, OWN)


def test_stray_windows_are_not_guessed_at(tmp_path):
    directory = DENSE["llama"](tmp_path)
    change_config(
        directory, sliding_window=24, layer_types=["full_attention"] + ["sliding_attention"] * 2
    )
    assert "windows" in choose(directory, AUTO).reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no model.layers.1.mlp.up_proj"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(9, 48)}), r"\[9, 48\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}), "I8"),
    ],
)
def test_files_that_hold_something_else_go_to_transformers_which_says_what(
    change, reason, tmp_path
):
    directory = DENSE["llama"](tmp_path)
    change_weights(directory, change)
    kind, said = choose(directory, AUTO)
    assert kind is THEIRS
    with pytest.raises(ConfigError, match=reason):
        choose(directory, OWN)
    assert said


@pytest.mark.parametrize("factor", [1, 2])
def test_a_head_in_the_files_counts_although_it_is_said_to_be_tied(factor, tmp_path):
    """As transformers reads them; if it is the embedding after all it is there once."""
    directory = DENSE["qwen3"](tmp_path)
    embedding = "model.embed_tokens.weight"
    change_weights(directory, lambda t: t.update({"lm_head.weight": factor * t[embedding]}))
    weights = load_dense(directory, dtype=torch.float32, device=torch.device("cpu")).weights
    assert (weights.head is weights.embedding) == (factor == 1)
    assert torch.equal(weights.head, stock_model(directory).lm_head.weight)
    assert torch.equal(weights.head, factor * weights.embedding)


def run(directory, forward):
    config = EngineConfig(
        model=str(directory),
        name="m",
        device_bytes=4 << 20,
        host_bytes=4 << 20,
        threads=1,
        forward=forward,
    )
    engine = build_engine(config)
    try:
        return answer(engine, "a")[0], answer(engine, "b"), engine.info, engine
    finally:
        engine.close()


def test_an_engine_says_what_computes_and_answers_the_same_either_way(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    directory = DENSE["gemma3"](tmp_path / "model")
    answers = {}
    for forward, kind in ((AUTO, DenseForward), (THEIRS, TransformersForward)):
        first, (second, cached), info, engine = run(directory, forward)
        assert isinstance(engine._executor._rank.runner._forward, kind)
        assert first == second
        assert cached.device > 0
        assert info.no_dense == ""
        answers[info.forward] = first
    assert answers["dense"] == answers["transformers"]
    assert "our own decoder" not in caplog.text


def test_an_engine_that_falls_back_says_why(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    directory = ODD["activation"][0](tmp_path / "model")
    _, _, info, _ = run(directory, AUTO)
    assert info.forward == "transformers"
    assert info.no_dense == "its activation is relu"
    assert "its activation is relu" in caplog.text
