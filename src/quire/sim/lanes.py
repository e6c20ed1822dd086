"""Lane: carries so many pages a second, one after the other; whoever comes late waits for the rest.

Knows time and numbers of pages; neither what they are nor where they go.
"""

from __future__ import annotations

from quire.sim.clock import VirtualClock


class Lane:
    def __init__(self, clock: VirtualClock, pages_per_s: float) -> None:
        """`pages_per_s` = 0: any number at once."""
        self._clock = clock
        self._pages_per_s = pages_per_s
        self._free_s = 0.0

    def carry_s(self, num_pages: int) -> float:
        """How long it takes from now until the last of them is through; they are on their way."""
        if not self._pages_per_s:
            return 0.0
        now = self._clock()
        self._free_s = max(self._free_s, now) + num_pages / self._pages_per_s
        return self._free_s - now


class Links:
    """The lines between engines: each carries what it sends, and what it gets, in a lane each."""

    def __init__(self, clock: VirtualClock, pages_per_s: float) -> None:
        self._clock = clock
        self._pages_per_s = pages_per_s
        self._lanes: dict[tuple[str, bool], Lane] = {}

    def carry_s(self, sender: str, receiver: str, num_pages: int) -> float:
        lanes = [self._lane(sender, is_sending=True), self._lane(receiver, is_sending=False)]
        return max(lane.carry_s(num_pages) for lane in lanes)

    def _lane(self, address: str, *, is_sending: bool) -> Lane:
        name = address, is_sending
        if name not in self._lanes:
            self._lanes[name] = Lane(self._clock, self._pages_per_s)
        return self._lanes[name]
