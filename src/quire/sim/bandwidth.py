"""SimLane: carries so many pages a second, one after the other; who comes late waits for the rest.

Knows time and numbers of pages; neither what they are nor where they go.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.sim.clock import VirtualClock


@dataclass(slots=True, eq=False)
class _Load:
    left_s: float


class SimLane:
    def __init__(self, clock: VirtualClock, pages_per_s: float) -> None:
        """`pages_per_s` = 0: any number at once."""
        self._clock = clock
        self._pages_per_s = pages_per_s
        self._loads: list[_Load] = []
        """On their way, the first of them now."""
        self._seen_s = 0.0

    def enter(self, num_pages: int) -> _Load:
        self._pass_time()
        load = _Load(num_pages / self._pages_per_s if self._pages_per_s else 0.0)
        self._loads.append(load)
        return load

    def left_s(self, load: _Load) -> float:
        """How long it takes from now until it is through, behind those before it."""
        self._pass_time()
        if load not in self._loads:
            return 0.0
        return sum(other.left_s for other in self._loads[: self._loads.index(load) + 1])

    def leave(self, load: _Load) -> None:
        """It is not wanted any more: its time is the others'."""
        self._pass_time()
        if load in self._loads:
            self._loads.remove(load)

    def carry_s(self, num_pages: int) -> float:
        """How long it takes from now until the last of them is through; they are on their way, and
        nothing stops them."""
        return self.left_s(self.enter(num_pages))

    def _pass_time(self) -> None:
        now = self._clock()
        passed_s, self._seen_s = now - self._seen_s, now
        while self._loads and self._loads[0].left_s <= passed_s:
            passed_s -= self._loads.pop(0).left_s
        if self._loads:
            self._loads[0].left_s -= passed_s


@dataclass(frozen=True, slots=True)
class SimPassage:
    """Pages that need several lanes at once, until they leave them."""

    loads: list[tuple[SimLane, _Load]]

    def left_s(self) -> float:
        return max((lane.left_s(load) for lane, load in self.loads), default=0.0)

    def leave(self) -> None:
        for lane, load in self.loads:
            lane.leave(load)


class SimLinks:
    """The lines between engines: each carries what it sends, and what it gets, in a lane each."""

    def __init__(self, clock: VirtualClock, pages_per_s: float) -> None:
        self._clock = clock
        self._pages_per_s = pages_per_s
        self._lanes: dict[tuple[str, bool], SimLane] = {}
        self.num_pages = 0
        """That have set out, whether or not they arrived."""

    def enter(self, sender: str, receiver: str, num_pages: int) -> SimPassage:
        self.num_pages += num_pages
        lanes = [self._lane(sender, is_sending=True), self._lane(receiver, is_sending=False)]
        return SimPassage([(lane, lane.enter(num_pages)) for lane in lanes])

    def _lane(self, address: str, *, is_sending: bool) -> SimLane:
        name = address, is_sending
        if name not in self._lanes:
            self._lanes[name] = SimLane(self._clock, self._pages_per_s)
        return self._lanes[name]
