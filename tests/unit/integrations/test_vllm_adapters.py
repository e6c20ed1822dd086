"""Adapters are told apart by what is in their files, not by where they lie."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mini_vllm import MiniRequest
from quire.integrations.vllm.adapters import AdapterFiles
from quire.integrations.vllm.naming import Naming
from quire.keys import Namespace


def trained(folder: Path, weights: bytes) -> Any:
    """An adapter, written there as a training leaves it."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_name=folder.name, lora_path=str(folder))


def test_an_adapter_trained_again_to_the_same_place_finds_nothing_of_the_old_one(
    tmp_path: Path,
) -> None:
    old = AdapterFiles().identify(trained(tmp_path / "a", b"old"))
    new = AdapterFiles().identify(trained(tmp_path / "a", b"new"))  # vLLM was started again
    assert None not in (old, new)
    assert old != new


def test_the_same_adapter_elsewhere_is_the_same(tmp_path: Path) -> None:
    files = AdapterFiles()
    one, two = (files.identify(trained(tmp_path / name, b"same")) for name in "ab")
    assert one is not None
    assert one == two


def test_what_vllm_has_in_memory_is_not_known_once_the_files_have_changed(tmp_path: Path) -> None:
    files = AdapterFiles()
    adapter = trained(tmp_path / "a", b"old")
    first = files.identify(adapter)
    assert files.identify(adapter) == first
    trained(tmp_path / "a", b"new")
    file = tmp_path / "a" / "adapter_model.safetensors"
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))  # however coarse the clock is
    assert files.identify(adapter) is None
    trained(tmp_path / "a", b"old")
    assert files.identify(adapter) is None, "vLLM may have read what was there in between"


@pytest.mark.parametrize("content", ["nothing", "no weights"])
def test_an_adapter_without_files_here_is_not_cached(tmp_path: Path, content: str) -> None:
    if content == "no weights":
        (tmp_path / "a").mkdir()
    adapter = SimpleNamespace(lora_name="a", lora_path=str(tmp_path / "a"))
    request = MiniRequest("r", list(range(16)))
    request.lora_request = adapter
    naming = Naming(Namespace("w", "bfloat16", 4), AdapterFiles().identify)
    assert naming.key(request, 16) is None
