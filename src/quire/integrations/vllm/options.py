"""What `kv_connector_extra_config` may say, checked once. Knows no vLLM.

{"store": "file:///var/cache/kv?max=200GiB", "host_memory": "20GiB"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.sizes import parse_size
from quire.store.url import split_urls


@dataclass(frozen=True, slots=True)
class VllmOptions:
    host_bytes: int
    """Of all ranks together."""
    store: str = ""
    """Empty: none."""
    model_fingerprint: str = ""
    """Empty: of the model's files, every byte of which is read at start."""
    wait_s: float = 10.0
    """The longest that a request waits for the store, at start and for its pages."""
    min_hit_tokens: int = 1
    """Shorter hits in the store are computed instead."""


_NAMES = ("host_memory", "store", "model_fingerprint", "wait_s", "min_hit_tokens")


def read_options(given: Mapping[str, object]) -> VllmOptions:
    """Raises ConfigError, in one sentence with the option's name."""
    unknown = sorted(set(given) - set(_NAMES))
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config has no option {', '.join(unknown)}: there are "
            f"{', '.join(_NAMES)}"
        )
    if "host_memory" not in given:
        raise ConfigError(
            'kv_connector_extra_config needs host_memory, such as {"host_memory": "20GiB"}'
        )
    store = str(given.get("store") or "")
    if store:
        split_urls(store)
    return VllmOptions(
        host_bytes=parse_size(str(given["host_memory"])),
        store=store,
        model_fingerprint=str(given.get("model_fingerprint") or ""),
        wait_s=_number(given, "wait_s", 10.0),
        min_hit_tokens=int(_number(given, "min_hit_tokens", 1)),
    )


def _number(given: Mapping[str, object], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{name} is {value!r}: it must be a number above 0")
    return float(value)
