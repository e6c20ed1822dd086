"""What would be fair: how long each waits for a line that is never idle while anybody does.

It may serve all in the order of their coming, or all at once in equal parts; a session's *fair
wait* is the longer of what the two would cost it, and what it takes beside the line when nobody
else is there: with a share of an empty line in its stead, a prompt of four pages would be treated
unfairly by a cluster in which it is alone. Knows times only.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class SessionWait:
    """Of one session, from its coming to its first token."""

    seconds: float
    in_order_s: float
    line_s: float
    """For the line, in order or in equal parts, whichever is longer."""
    alone_s: float = 0.0
    """What it takes beside that also in an empty cluster: to be asked for, computed, copied and
    read, in turns of two engines."""

    @property
    def ratio(self) -> float:
        return self.seconds / (self.line_s + self.alone_s)


_Load = tuple[float, float]
"""When it comes, and how long it takes alone."""


def in_order(loads: list[_Load]) -> list[float]:
    """When each is through, one after the other. They come in this order."""
    ends, free_s = [], 0.0
    for come_s, takes_s in loads:
        free_s = max(free_s, come_s) + takes_s
        ends.append(free_s)
    return ends


def in_equal_parts(loads: list[_Load]) -> list[float]:
    """When each is through, if all that are there have an equal part of the line at any time.

    `served` is what anybody has had who was there all the time: whoever came when it was at s, and
    takes t, is through when it is at s + t.
    """
    ends = [0.0] * len(loads)
    there: list[tuple[float, int]] = []
    now, served = 0.0, 0.0
    coming = [*enumerate(loads), (-1, (float("inf"), 0.0))]
    for index, (come_s, takes_s) in coming:
        while there and now + (there[0][0] - served) * len(there) <= come_s:
            at, first = there[0]
            now, served = now + (at - served) * len(there), at
            heapq.heappop(there)
            ends[first] = now
        if index < 0:
            break
        if there:
            served += (come_s - now) / len(there)
        now = come_s
        heapq.heappush(there, (served + takes_s, index))
    return ends
