"""What a user may call a model, what is said otherwise, and loading without a network."""

import json
import shutil
import socket
import subprocess
import sys

import pytest
import torch

from quire.errors import ModelError
from quire.models import ModelShape, describe, load_model, load_tokenizer, resolve

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def change_config(model, **changes):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(directory):
    return load_model(directory, dtype=torch.float32, device=CPU, attention="eager")


# ---- resolve -------------------------------------------------------------------------------------


def test_a_directory_of_safetensors_is_itself(tiny_model):
    assert resolve(str(tiny_model)) == tiny_model


def test_a_gguf_file_and_a_directory_with_one_are_converted(tiny_gguf, tiny_model):
    cache = tiny_model.parent.parent
    assert resolve(str(tiny_gguf), cache_dir=cache) == tiny_model
    assert resolve(str(tiny_gguf.parent), cache_dir=cache) == tiny_model


def test_a_directory_with_several_gguf_files_is_not_guessed_at(tiny_gguf, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(tiny_gguf, tmp_path / name)
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files: give the path of one"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/no/such/thing", "does not exist"),
        ("HuggingFaceTB/SmolLM2-135M", "give the path of a local directory"),
        ("model.safetensors", "does not exist"),
    ],
)
def test_what_is_not_there_is_said(name, says):
    with pytest.raises(ModelError, match=says):
        resolve(name)


def test_a_single_weight_file_is_not_a_model(model):
    with pytest.raises(ModelError, match="give the model's directory"):
        resolve(str(model / "model.safetensors"))


def test_a_directory_without_configuration(model):
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(model))


def test_weights_in_another_format(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ModelError, match="convert them to safetensors"):
        resolve(str(model))


def test_no_weights(model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        resolve(str(model))


def test_an_adapter(model):
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge it"):
        resolve(str(model))


def test_a_configuration_that_names_other_weights_than_we_would_fingerprint(model):
    change_config(model, transformers_weights="other.safetensors")
    with pytest.raises(ModelError, match="transformers_weights"):
        resolve(str(model))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_configuration(model, text):
    (model / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve(str(model))


# ---- describe ------------------------------------------------------------------------------------


def test_the_shape(tiny_model):
    shape = describe(tiny_model)
    assert shape == ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=261,
        max_position_embeddings=256,
        num_parameters=shape.num_parameters,
        weight_bytes=4 * shape.num_parameters,
        full_layers=(0, 1),
    )
    assert shape.state_bytes("float32") == 0
    assert shape.num_parameters == sum(p.numel() for p in load(tiny_model).parameters())


def test_the_head_size_follows_from_the_hidden_size(model):
    config = json.loads((model / "config.json").read_text())
    del config["head_dim"], config["num_key_value_heads"]
    (model / "config.json").write_text(json.dumps(config))
    shape = describe(model)
    assert (shape.num_kv_heads, shape.head_dim) == (4, 16)


def test_a_model_that_cannot_be_served_is_not_described(model):
    change_config(model, model_type="mistral", sliding_window=16)
    with pytest.raises(ModelError, match="sliding window of 16 tokens"):
        describe(model)


def test_an_unknown_kind_of_model(model):
    change_config(model, model_type="no-such-model", architectures=["NoSuchModel"])
    with pytest.raises(ModelError, match="no-such-model"):
        describe(model)


def test_code_that_comes_with_a_model_is_never_run(model):
    marker = model / "was_run"
    (model / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change_config(model, model_type="evil", auto_map=auto)
    with pytest.raises(ModelError):
        describe(model)
    with pytest.raises(ModelError):
        load(model)
    assert not marker.exists()


# ---- load ----------------------------------------------------------------------------------------


def test_a_loaded_model_is_ready_to_run(tiny_model):
    model = load(tiny_model)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "eager"
    assert model(torch.tensor([[0, 1, 2]])).logits.shape == (1, 3, 261)


def test_the_dtype_is_the_one_asked_for(tiny_model):
    model = load_model(tiny_model, dtype=torch.bfloat16, device=CPU, attention="sdpa")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_loading_is_silent_and_leaves_transformers_settings_alone(tiny_model, capfd):
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    load(tiny_model)
    load_tokenizer(tiny_model)
    describe(tiny_model)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_loading_opens_no_connection(tiny_model, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    describe(tiny_model)
    load(tiny_model)
    load_tokenizer(tiny_model)


def test_weights_cut_short(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        load(model)


def test_weights_that_do_not_fit_the_configuration(model):
    change_config(model, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"not have all weights.*layers\.2"):
        load(model)


def test_weights_of_another_shape(model):
    change_config(model, intermediate_size=128)
    with pytest.raises(ModelError, match=r"such as model\.layers\.0\.mlp"):
        load(model)


def test_a_directory_without_tokenizer(model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(model)


def test_importing_the_package_imports_no_torch():
    code = "import sys, quire.models; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
