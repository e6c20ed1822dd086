"""Whether what was claimed was reached, in words for a person."""

from __future__ import annotations

from typing import Any

_MISSED = "[bold red]missed[/]"


def reached(is_so: bool) -> str:
    return "reached" if is_so else _MISSED


def verdict(ratio: dict[str, Any], target: float) -> str:
    """Only what the whole interval says is said."""
    if ratio["high"] - 1 <= target:
        return reached(True)
    if ratio["low"] - 1 > target:
        return reached(False)
    return "[yellow]undecided[/], as the noise is larger: give more --rounds on a quiet machine"
