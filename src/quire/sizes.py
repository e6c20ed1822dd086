"""Sizes as people write them, and back. Knows nothing of what is being measured."""

from __future__ import annotations

import re

from quire.errors import ConfigError

# "20G" means GiB: memory and disks for caches are thought of in powers of two.
_LETTERS = "kmgt"
_LARGEST = (1 << 63) - 1
"""Beyond, no size can be told to a system."""
_SIZE = re.compile(rf"(\d{{1,18}}(?:\.\d{{1,18}})?)\s*(?:([{_LETTERS}])(ib|b)?|b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """ "20GiB" → bytes. Raises ConfigError in one sentence with an example."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write a number and a unit, such as 20GiB")
    step = 1000 if (match[3] or "").lower() == "b" else 1024
    factor = step ** (_LETTERS.index(match[2].lower()) + 1) if match[2] else 1
    size_bytes = round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if size_bytes > _LARGEST:
        raise ConfigError(f"{text!r} is more than anything holds: write a size such as 20GiB")
    return size_bytes


def format_bytes(size_bytes: float) -> str:
    """Bytes → "19.5 GiB", three significant digits at most."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
