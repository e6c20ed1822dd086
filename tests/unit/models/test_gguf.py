"""GGUF files: what is refused at once, and that a conversion computes the same."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from gguf import GGMLQuantizationType

from quire.errors import ModelError
from quire.models import load_model, load_tokenizer
from quire.models.gguf import convert_gguf
from quire.models.header import read_header
from unit.models.tiny import CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN, write_tiny_gguf

WAIT_S = 60.0
"""Only how long a broken test takes to fail."""

PROMPT = torch.tensor([[0, 5, 9, 200, 259, 260, 7]])


def test_the_header_is_read(tiny_gguf):
    header = read_header(tiny_gguf)
    assert header.architecture == "llama"
    assert header.fields["llama.block_count"] == 2
    assert header.fields["tokenizer.chat_template"] == CHAT_TEMPLATE
    assert "tokenizer.ggml.tokens" not in header.fields
    assert "blk.1.ffn_down.weight" in header.tensors


def test_every_cut_of_a_file_is_noticed(tiny_gguf, tmp_path):
    data = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 20, 100, 3000, 6000, len(data) // 2, len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            convert_gguf(cut, tmp_path)
    assert not (tmp_path / "models").exists()


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert_gguf(path, tmp_path)
    path.write_bytes(b"GGUF" + bytes([9, 0, 0, 0]) + bytes(100))
    with pytest.raises(ModelError, match="version 9"):
        convert_gguf(path, tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        convert_gguf(tmp_path / "none.gguf", tmp_path)


def test_lengths_that_lie_do_not_take_memory_or_time(tmp_path):
    path = tmp_path / "m.gguf"
    huge = (2**63).to_bytes(8, "little")
    header = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little")
    for rest in (huge, (1).to_bytes(8, "little") + huge):
        path.write_bytes(header + rest + bytes(64))
        with pytest.raises(ModelError, match="damaged or cut short"):
            read_header(path)


def test_one_part_of_a_split_model_is_refused(tmp_path):
    part = write_tiny_gguf(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(ModelError, match="merge"):
        convert_gguf(part, tmp_path)


def test_a_conversion_computes_what_the_file_computes(tiny_gguf, tiny_model):
    from transformers import AutoModelForCausalLM

    direct = AutoModelForCausalLM.from_pretrained(
        tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32
    )
    converted = load_model(
        tiny_model, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa"
    )
    with torch.no_grad():
        assert torch.equal(direct(PROMPT).logits, converted(PROMPT).logits)
    assert converted.config.rms_norm_eps == direct.config.rms_norm_eps


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        pytest.param("F16", "F16", marks=pytest.mark.long),
        ("BF16", "BF16"),
        pytest.param("F32", "F32", marks=pytest.mark.long),
        ("Q8_0", "F32"),
    ],
)
def test_weights_keep_the_precision_of_the_file(kind, stored, tmp_path):
    """And their values, to the bit; what was quantised is exact in float32 alone."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    source = write_tiny_gguf(tmp_path / "tiny.gguf", kind=GGMLQuantizationType[kind])
    converted = convert_gguf(source, tmp_path)
    with safe_open(converted / "model.safetensors", framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {stored}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}, "random values"
    direct = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    model = load_model(converted, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa")
    with torch.no_grad():
        assert torch.equal(direct(PROMPT).logits, model(PROMPT).logits)


def test_tokenizer_template_and_ends_are_kept(tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    ids = tokenizer("hello")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["he", "ll", "o"]
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.eos_token_id == END_OF_TEXT
    model = load_model(
        tiny_model, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa"
    )
    assert model.generation_config.eos_token_id == [END_OF_TEXT, END_OF_TURN]


def test_it_is_converted_once_and_found_by_content(tiny_gguf, tiny_model, tmp_path):
    cache = tiny_model.parent.parent
    reports = []
    again = convert_gguf(tiny_gguf, cache, lambda what, done: reports.append(what))
    assert again == tiny_model
    assert set(reports) == {"reading tiny.gguf"}


def test_progress_goes_from_start_to_end(conversion):
    done = [share for _, share in conversion[1]]
    assert done == sorted(done)
    assert len(done) > 20
    assert done[-1] == 1.0


def test_a_file_without_all_weights_is_refused(tmp_path):
    source = write_tiny_gguf(tmp_path / "tiny.gguf", leave_out="blk.1.attn_k.weight")
    with pytest.raises(ModelError, match=r"missing.*layers\.1\.self_attn\.k_proj"):
        convert_gguf(source, tmp_path)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_a_file_that_would_be_converted_wrongly_is_refused(tmp_path):
    source = write_tiny_gguf(tmp_path / "tiny.gguf", extra="rope_freqs.weight")
    with pytest.raises(ModelError, match="directory of safetensors instead"):
        convert_gguf(source, tmp_path)


def test_the_converter_ends_with_the_process_that_started_it(tiny_gguf, tmp_path):
    code = (
        "import sys; from pathlib import Path; from quire.models.gguf import convert_gguf;"
        "convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), lambda *a: print(*a, flush=True))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, tiny_gguf, tmp_path], stdout=subprocess.PIPE, text=True
    )
    for line in parent.stdout:
        if line.startswith("reading the tokenizer"):
            break
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent.pid)], capture_output=True, text=True, check=True
    )
    (child,) = map(int, children.stdout.split())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(WAIT_S)
    parent.stdout.close()
    deadline = time.monotonic() + WAIT_S
    while is_running(child):
        assert time.monotonic() < deadline, "the converter goes on"
        time.sleep(0.02)
    assert [p.suffix for p in (tmp_path / "models").iterdir()].count(".part") == 1
    made = convert_gguf(tiny_gguf, tmp_path)
    assert (made / "model.safetensors").exists()
    assert [p.suffix for p in (tmp_path / "models").iterdir()].count(".part") == 0


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
