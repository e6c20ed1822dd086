"""How work that takes long tells how far it is: each shape of that once, under its own name."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""
Share = Callable[[str, float], None]
"""Called with what is being done, and which part of it is done, from 0 to 1."""
Count = Callable[[int, int], None]
"""Called with how much is done, and of how much."""
Ticks = Callable[[int], None]
"""Called now and then with how much is done, by who does not say of how much."""
