"""Waits until processes rest, so that what one has left to do does not slow the next one down.
Knows Linux's /proc; where there is none it does not wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

LOOK_S = 0.05
AT_REST = 0.2
"""Of one core, and less."""
LONGEST_S = 10.0
_NS = 1_000_000_000


def wait_for_rest(processes: Iterable[int]) -> bool:
    """Until they want next to nothing of the processor, or for LONGEST_S; whether they rest."""
    watched = list(processes)
    until = time.monotonic() + LONGEST_S
    used, looked = _used_s(watched), time.monotonic()
    while time.monotonic() < until:
        time.sleep(LOOK_S)
        now, at = _used_s(watched), time.monotonic()
        if now - used <= AT_REST * (at - looked) and not _wants_to_run(watched):
            return True
        used, looked = now, at
    return False


def _used_s(processes: list[int]) -> float:
    """Time on a processor or waiting for one, of all their threads."""
    return sum(_of_thread(path) for one in processes for path in _threads(one, "schedstat")) / _NS


def _wants_to_run(processes: list[int]) -> bool:
    """Who has not come to it since the last look has not been counted as waiting either."""
    return any(_state(path) == "R" for one in processes for path in _threads(one, "stat"))


def _state(path: Path) -> str:
    try:
        return path.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended
        return ""


def _threads(process: int, file: str) -> list[Path]:
    return list(Path(f"/proc/{process}/task").glob(f"*/{file}"))


def _of_thread(path: Path) -> int:
    try:
        running, waiting, _ = path.read_text().split()
        return int(running) + int(waiting)
    except (OSError, ValueError):  # it has ended, or nobody counts here
        return 0
