"""MeasuredLengths: how long sequences are that this engine serves, remembered between starts.

A model with windows or recurrent layers divides its memory by the length of a typical sequence
(pools.py). Nobody knows that better than the engine that has served them.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from quire.models import cache_dir

DEFAULT_TOKENS = 2048
_SMOOTHING = 0.02
_LIMITS = (64, 1 << 20)


class MeasuredLengths:
    def __init__(self, fingerprint: str, directory: Path | None = None) -> None:
        """Reads what was measured before; a file that makes no sense is as good as none."""
        self._path = (directory or cache_dir() / "usage") / f"{fingerprint[:32]}.json"
        self._mean: float | None = None
        self._is_new = False
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            self._mean = float(json.loads(self._path.read_text())["typical_tokens"])

    @property
    def typical_tokens(self) -> int:
        if self._mean is None or not self._mean > 0:  # NaN is not
            return DEFAULT_TOKENS
        return int(min(max(self._mean, _LIMITS[0]), _LIMITS[1]))

    def observe(self, num_tokens: int) -> None:
        """A sequence has come to its end."""
        old = num_tokens if self._mean is None else self._mean
        self._mean = old + _SMOOTHING * (num_tokens - old)
        self._is_new = True

    def save(self) -> None:
        """When the engine ends, and not before: no step waits for a disk. Whole or not at all;
        where it cannot be written, the next start measures anew."""
        if not self._is_new or self._mean is None:
            return
        self._is_new = False
        part = self._path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"typical_tokens": round(self._mean, 1)}))
            part.replace(self._path)
