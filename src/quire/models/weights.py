"""The weight files of a model directory: exactly those that transformers would load.

Knows safetensors' names and headers, not models.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ModelError

CONFIG_NAME = "config.json"
_SINGLE_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"
_ADAPTER_NAME = "adapter_config.json"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class WeightTotals:
    num_parameters: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weight file, as its header says."""

    file: Path
    dtype: str
    """In safetensors' words: F32, BF16, …"""
    shape: tuple[int, ...]
    size_bytes: int


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError unless it is a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}): get the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object: get the file again")
    return value


def weight_files(directory: Path) -> list[Path]:
    """Those that make up the model, sorted. Raises ModelError if they are not there, not all
    there, or if something would be loaded beside them."""
    if not (directory / CONFIG_NAME).is_file():
        raise ModelError(
            f"{directory} has no {CONFIG_NAME}: give a directory as transformers saves it, or a "
            ".gguf file"
        )
    if (directory / _ADAPTER_NAME).exists():
        raise ModelError(f"{directory} holds an adapter: merge it into the model's weights first")
    if "transformers_weights" in read_json(directory / CONFIG_NAME):
        raise ModelError(
            f"{directory / CONFIG_NAME} has transformers_weights: remove it and name the weights "
            f"{_SINGLE_NAME}"
        )
    if (directory / _SINGLE_NAME).is_file():
        return [directory / _SINGLE_NAME]
    if (directory / _INDEX_NAME).is_file():
        return _shards(directory)
    if any(next(directory.glob(pattern), None) for pattern in _OTHER_FORMATS):
        raise ModelError(
            f"{directory} has no safetensors, only weights in another format: convert them to "
            "safetensors (transformers' save_pretrained does it)"
        )
    raise ModelError(f"{directory} has no weights: neither {_SINGLE_NAME} nor {_INDEX_NAME}")


def weight_totals(directory: Path) -> WeightTotals:
    """What is in the weight files, read from their headers. Raises ModelError."""
    tensors = stored_tensors(directory).values()
    return WeightTotals(
        sum(math.prod(tensor.shape) for tensor in tensors),
        sum(tensor.size_bytes for tensor in tensors),
    )


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of the model by name, from the headers. Raises ModelError, also for a file that
    was cut short."""
    files = weight_files(directory)
    return {name: tensor for file in files for name, tensor in _tensors(file).items()}


def _shards(directory: Path) -> list[Path]:
    shards = read_json(directory / _INDEX_NAME).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{directory / _INDEX_NAME} names no weight files: get it again")
    files = [directory / str(name) for name in sorted(set(shards.values()))]
    for file in files:
        if not file.is_file():
            raise ModelError(
                f"{directory} lacks {file.name}, which {_INDEX_NAME} names: get it too"
            )
    return files


def _tensors(file: Path) -> dict[str, StoredTensor]:
    """Checks that the file is as long as they say."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError("no header")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, entry) for name, entry in header.items()}
        data_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if file.stat().st_size < 8 + size + data_bytes:
            raise ValueError("cut short")
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file} is damaged or cut short: get the file again") from error
    return tensors


def _stored(file: Path, entry: dict[str, Any]) -> StoredTensor:
    start, end = entry["data_offsets"]
    return StoredTensor(file, entry["dtype"], tuple(entry["shape"]), end - start)
