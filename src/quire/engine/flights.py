"""Flights: batches on their way through the executor, and how long each kept it busy.

With an executor that overlaps, one batch is launched before the one ahead of it is waited for, so
that the device never waits for us. It knows neither requests nor pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.batch import Batch, BatchResult
from quire.engine.executor import Executor, RankLost


@dataclass(frozen=True, slots=True)
class Landed:
    batch: Batch
    outcome: BatchResult | Exception
    """The error concerns this batch only."""
    seconds: float
    """From its launch, or from the end of the batch before it."""
    turn_s: float
    """From the end of the batch before it, in any case."""


@dataclass(frozen=True, slots=True)
class _Flight:
    batch: Batch
    began_s: float
    error: Exception | None
    """It could not be launched."""


class Flights:
    def __init__(
        self,
        executor: Executor,
        *,
        overlaps: bool,
        clock: Callable[[], float],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """`meanwhile`: what there is to do while a batch takes long."""
        self._executor = executor
        self._meanwhile = meanwhile
        self._overlaps = overlaps
        self._clock = clock
        self._under_way: deque[_Flight] = deque()
        self._landed_s = 0.0

    def __len__(self) -> int:
        return len(self._under_way)

    def launch(self, batch: Batch) -> None:
        """Raises RankLost."""
        began, error = self._clock(), None
        try:
            self._executor.launch(batch)
        except RankLost:
            raise
        except Exception as problem:  # request boundary: whose batch it is will hear of it
            error = problem
        self._under_way.append(_Flight(batch, began, error))

    @property
    def is_due(self) -> bool:
        """Is the first of them to be waited for before another is launched? Nothing can follow a
        batch that could not be launched."""
        if not self._under_way:
            return False
        return len(self._under_way) > self._overlaps or self._under_way[-1].error is not None

    def land(self) -> Landed:
        """Wait for the first of them. Raises RankLost."""
        flight = self._under_way.popleft()
        outcome: BatchResult | Exception
        if flight.error is not None:
            outcome = flight.error
        else:
            try:
                outcome = self._executor.collect(self._meanwhile)
            except RankLost:
                raise
            except Exception as problem:  # request boundary, as above
                outcome = problem
        before, self._landed_s = self._landed_s, self._clock()
        began = max(flight.began_s, before)
        return Landed(flight.batch, outcome, self._landed_s - began, self._landed_s - before)
