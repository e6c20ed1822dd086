"""LocalExecutor: the only rank, in the engine's own process."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from quire.engine.batch import Batch, BatchResult
from quire.engine.executor.base import RankLost
from quire.engine.executor.rank import Rank
from quire.engine.layouts import FULL
from quire.engine.runner import Flight
from quire.engine.selfcheck import check_resume
from quire.errors import EngineError
from quire.memory.device import DevicePool
from quire.store.account import StoreAccount
from quire.worker import LocalWorkers

_LONG_TOKENS = 512
_LOOK_EVERY_S = 0.001


class LocalExecutor:
    def __init__(self, rank: Rank, *, overlaps: bool) -> None:
        self._rank = rank
        self.workers = LocalWorkers([rank.worker])
        self.overlaps = overlaps
        self._flights: deque[Flight] = deque()

    def launch(self, batch: Batch) -> None:
        try:
            self._flights.append(self._rank.runner.launch(batch))
        except Exception as error:
            raise explained(error) from error

    def collect(self, meanwhile: Callable[[], None]) -> BatchResult:
        flight = self._flights.popleft()
        # What decodes is over soon, and every token waits for it: nothing is to come in between.
        is_long = flight.batch.num_tokens >= _LONG_TOKENS
        while is_long and not self._is_over(flight):
            meanwhile()
            time.sleep(_LOOK_EVERY_S)
        try:
            return flight.collect()
        except Exception as error:
            raise explained(error) from error

    def _is_over(self, flight: Flight) -> bool:
        try:
            return flight.is_over
        except Exception as error:
            raise explained(error) from error

    def difference(self, page: int, other: int) -> float:
        """Of two device pages: see engine/auditing.py."""
        return difference(self._rank.worker.components[FULL].device, page, other)

    def self_check(self) -> str:
        return check_resume(self._rank)

    def store_account(self) -> StoreAccount:
        return self._rank.worker.store_account()

    def close(self) -> None:
        self._rank.close()


def difference(pool: DevicePool, page: int, other: int) -> float:
    """The largest, over all layers, in units of the root of the mean square of the second's."""
    import torch

    most = 0.0
    for layer in range(pool.layout.num_layers):
        for plane in pool.planes(layer):
            one, two = plane[page].float(), plane[other].float()
            if torch.equal(one, two):
                continue
            scale = two.square().mean().sqrt()
            off = float((one - two).abs().max() / scale)
            most = max(most, off if math.isfinite(off) else math.inf)
    return most


def explained(error: Exception) -> Exception:
    """What an error of the model means to the engine.

    After some errors an accelerator answers nothing any more, and what it has computed since it was
    last heard of is not to be trusted: then RankLost, so that nothing of it is shared.
    """
    import torch

    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            reason = " ".join(str(error).split())[:300]
            return RankLost(f"the accelerator is broken: {reason}")
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return EngineError(
            "the device had no memory left to compute it in: lower device_memory, chunk_tokens or "
            "max_running"
        )
    return error
