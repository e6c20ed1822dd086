"""ClusterHealth: was there a way for a request that nothing had disturbed? Then it may not fail.

    something goes wrong ──▶ `disturbed(where, seconds)`      engine, line between two, or all
    a request fails      ──▶ `is_well(where, since)`          for what it could have used

Knows places by name and times; neither engines nor requests.
"""

from __future__ import annotations

from quire.sim.clock import VirtualClock

ALL = ""


class ClusterHealth:
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._until_s: dict[str, float] = {}

    def disturbed(self, where: str, seconds: float = 0.0) -> None:
        """It is now, and for so long."""
        self._until_s[where] = max(self._until_s.get(where, 0.0), self._clock() + seconds)

    def is_well(self, where: str, since_s: float) -> bool:
        """Has nothing disturbed it since then?"""
        return self._until_s.get(where, -1.0) < since_s


def line(one: str, other: str) -> str:
    """The name of what is between two places."""
    return " - ".join(sorted((one, other)))
