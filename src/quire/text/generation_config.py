"""generation_config.json: what a model's makers say of its ends and of how to sample from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """For what a request does not say. OpenAI's own, unless the model has others."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0


_LIMITS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Empty if there is none. Raises ModelError."""
    path = directory / "generation_config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def sampling_defaults(config: dict[str, Any]) -> SamplingDefaults:
    """What is there and makes sense. `do_sample: false` is not taken for greedy: it is what the
    file says when nobody has thought about it."""
    found: dict[str, Any] = {}
    for field in fields(SamplingDefaults):
        value = config.get(field.name)
        low, high = _LIMITS[field.name]
        is_number = type(value) is int or (type(value) is float and field.name != "top_k")
        if value is not None and is_number and low <= value <= high:
            found[field.name] = value
    return SamplingDefaults(**found)
