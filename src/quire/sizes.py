"""Sizes as people write them, and back. Knows nothing of what is being measured."""

from __future__ import annotations

import re

from quire.errors import ConfigError

# "20G" means GiB: memory and disks for caches are thought of in powers of two.
_FACTORS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 10**3,
    "m": 1 << 20,
    "mib": 1 << 20,
    "mb": 10**6,
    "g": 1 << 30,
    "gib": 1 << 30,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """ "20GiB" → bytes. Raises ConfigError in one sentence with an example."""
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a size: write a number and a unit, such as 20GiB")
    return round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_bytes(size_bytes: float) -> str:
    """Bytes → "19.5 GiB", three significant digits at most."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
