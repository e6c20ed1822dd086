"""Which slot holds the history of which request, and up to where. Numbers only; no tensors.

A slot counts the output of one request. The device adds each token right after drawing it, so a
request that comes back for the next position goes on; any other time (new, preempted, begun again,
a draw that came to nothing) its slot is filled again from the row's own tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quire.types import RequestId


@dataclass(slots=True)
class Slot:
    number: int
    position: int | None = None
    """Of the last token in it; None: history and biases are not there."""
    num_biases: int = 0


class Slots:
    """At most `capacity` requests; the one that was drawn for longest ago gives way."""

    def __init__(self, capacity: int) -> None:
        self._slots: dict[RequestId, Slot] = {}  # drawn for longest ago first
        self._free = list(range(capacity))

    def take(self, id: RequestId, batch: Collection[RequestId]) -> Slot:
        """The slot of a request of this batch; none of the batch gives way."""
        slot = self._slots.pop(id, None)
        if slot is None:
            if not self._free:
                self.drop(next(other for other in self._slots if other not in batch))
            slot = Slot(self._free.pop())
        self._slots[id] = slot
        return slot

    def drop(self, id: RequestId) -> None:
        slot = self._slots.pop(id, None)
        if slot is not None:
            self._free.append(slot.number)
