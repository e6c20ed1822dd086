"""What makes two models the same model: a digest of the weights and of what computes with them.

Two models with one fingerprint may share pages of KV cache, so every byte of every weight file is
read, each time: dates and sizes can stay the same while the weights change.

    sha256( version ‖ config.json without cosmetic keys ‖ for each file by name: name, size,
            sha256 of each block of 16 MiB )            blocks are hashed in parallel
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.models.cache import no_progress
from quire.models.weights import CONFIG_NAME, read_json, weight_files
from quire.progress import Share

_VERSION = b"quire model 1"
_BLOCK_BYTES = 16 << 20
_MAX_THREADS = 16

# Where a configuration comes from and what wrote it. Anything else may change the computation.
_COSMETIC = {
    "_name_or_path",
    "_model_name_or_path",
    "_commit_hash",
    "transformers_version",
}


def fingerprint(directory: Path, progress: Share | None = None) -> str:
    """64 hex digits. Raises ModelError if a file of the model is missing or cannot be read."""
    report = progress or no_progress
    config = _without_cosmetics(read_json(directory / CONFIG_NAME))
    digest = hashlib.sha256(_VERSION)
    _add(digest, json.dumps(config, sort_keys=True).encode())
    files = weight_files(directory)
    done_bytes = 0
    try:
        total_bytes = max(1, sum(file.stat().st_size for file in files))
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
            for file in files:
                size = file.stat().st_size
                _add(digest, str(file.relative_to(directory)).encode())
                _add(digest, size.to_bytes(8, "little"))
                offsets = range(0, size, _BLOCK_BYTES)
                for block in threads.map(_block_digest, [file] * len(offsets), offsets):
                    digest.update(block)
                    done_bytes += _BLOCK_BYTES
                    report("checking weights", min(1.0, done_bytes / total_bytes))
    except OSError as error:
        raise ModelError(f"{directory} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _block_digest(file: Path, offset: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return hashlib.sha256(stream.read(_BLOCK_BYTES)).digest()


def _add(digest: Any, field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))  # no two field lists concatenate alike
    digest.update(field)


def _without_cosmetics(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_cosmetics(v) for k, v in value.items() if k not in _COSMETIC}
    if isinstance(value, list):
        return [_without_cosmetics(item) for item in value]
    return value
