"""The fingerprint changes with the weights and the computation, and with nothing else."""

import json
import os
import random
import shutil
from importlib import import_module

import pytest

from quire.errors import ModelError
from quire.models import fingerprint


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def small_blocks(monkeypatch):
    monkeypatch.setattr(import_module("quire.models.fingerprint"), "_BLOCK_BYTES", 4096)


def change_config(model, **changes):
    path = model / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))


def test_it_is_the_same_for_a_copy(tiny_model, model):
    assert fingerprint(model) == fingerprint(tiny_model)
    assert len(bytes.fromhex(fingerprint(model))) == 32


def test_any_changed_byte_changes_it_even_if_size_and_date_stay(model):
    path = model / "model.safetensors"
    before, stat = fingerprint(model), path.stat()
    original = path.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    rng = random.Random(0)
    for place in [header, len(original) - 1, *(rng.randrange(header, len(original)) for _ in "ab")]:
        changed = bytearray(original)
        changed[place] ^= 1
        path.write_bytes(changed)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert fingerprint(model) != before
    path.write_bytes(original)
    assert fingerprint(model) == before


def test_blocks_are_told_apart(model, monkeypatch):
    """Exchanging two whole blocks of a file is a change too."""
    small_blocks(monkeypatch)
    path = model / "model.safetensors"
    before, data = fingerprint(model), path.read_bytes()
    block = 4096
    path.write_bytes(
        data[:block] + data[2 * block : 3 * block] + data[block : 2 * block] + data[3 * block :]
    )
    assert fingerprint(model) != before


def test_what_changes_the_computation_changes_it(model):
    before = fingerprint(model)
    change_config(model, rms_norm_eps=1e-6)
    after = fingerprint(model)
    assert after != before
    change_config(model, rope_parameters={"rope_theta": 1.0, "rope_type": "default"})
    assert fingerprint(model) not in (before, after)


def test_names_and_versions_and_the_order_of_keys_do_not(model):
    before = fingerprint(model)
    change_config(model, _name_or_path="elsewhere", transformers_version="9", _commit_hash="1")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    (model / "README.md").write_text("words")
    assert fingerprint(model) == before


def test_every_shard_counts(model):
    (model / "model.safetensors").rename(model / "a.safetensors")
    shutil.copy(model / "a.safetensors", model / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    before = fingerprint(model)
    for name in ("a", "b"):
        path = model / f"{name}.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert fingerprint(model) != before
        path.write_bytes(data)
    (model / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks b\.safetensors"):
        fingerprint(model)


def test_progress_reaches_the_end(model, monkeypatch):
    small_blocks(monkeypatch)
    reports = []
    fingerprint(model, lambda what, done: reports.append(done))
    assert reports == sorted(reports)
    assert reports[-1] == 1.0
