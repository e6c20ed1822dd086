"""Fan: a lane for each peer, so that one that stalls holds up nobody but its own readers.

Knows names of peers; nothing of what they are asked. With more peers than there may be lanes some
share one.
"""

from __future__ import annotations

from collections import OrderedDict

from quire.worker.lanes import Lane, Task


class Fan:
    """Used by one thread, the step's."""

    def __init__(self, name: str, num_threads: int, max_queued: int, max_lanes: int) -> None:
        """`num_threads`, `max_queued`: of each lane."""
        self._name = name
        self._num_threads = num_threads
        self._max_queued = max_queued
        self._max_lanes = max_lanes
        self._lanes: list[Lane] = []
        self._by_peer: OrderedDict[str, Lane] = OrderedDict()
        """The latest used last; no more than there are lanes."""

    def submit(self, peer: str, task: Task) -> bool:
        """As of a Lane."""
        return self._lane_of(peer).submit(task)

    def close(self, timeout_s: float) -> bool:
        """As of a Lane."""
        ended = [lane.close(timeout_s) for lane in self._lanes]
        return all(ended)

    def _lane_of(self, peer: str) -> Lane:
        lane = self._by_peer.pop(peer, None)
        if lane is None:
            if len(self._lanes) < self._max_lanes:
                name = f"{self._name}-{len(self._lanes)}"
                lane = Lane(name, self._num_threads, self._max_queued)
                self._lanes.append(lane)
            else:  # that of the one not heard of for longest: it may have started anew since
                _, lane = self._by_peer.popitem(last=False)
        self._by_peer[peer] = lane
        return lane
