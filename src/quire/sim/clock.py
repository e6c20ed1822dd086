"""VirtualClock: time that passes only when the simulation says so. Knows nothing else."""

from __future__ import annotations


class VirtualClock:
    """Call it for the time in seconds, as one would time.monotonic."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards (asked for {seconds} s)")
        self._now_s += seconds

    def advance_to(self, time_s: float) -> None:
        """To `time_s`, or nowhere if that is past."""
        self._now_s = max(self._now_s, time_s)
