"""Which mover serves a direction: the fastest on this machine, for these pools, as measured.

The copy engines are taken even if they are a little slower, since they leave the compute units to
the model; then our own kernel, which needs few of them.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.errors import ConfigError
from quire.transfer.kinds import MoverKind
from quire.transfer.movers import Ends, IndexMover, Mover, Pages

_MEASURED_BYTES = 64 << 20
_REPEATS = 3
_GOOD_ENOUGH = 0.95
"""Of the fastest's rate: a mover that is preferred may be so much slower."""
_PREFERRED = (MoverKind.DMA, MoverKind.KERNEL, MoverKind.INDEX)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Chosen:
    loads: Mover
    backups: Mover
    reason: str
    """For people."""


def choose(ends: Ends, kind: MoverKind, clock: Clock = time.perf_counter) -> Chosen:
    """Raises ConfigError if the mover asked for cannot serve these pools.

    Measuring leaves what the device pool holds as it was, and host pages overwritten.
    """
    if not len(ends.host):
        return _both(MoverKind.INDEX, ends, "no host pages, no copies")
    if kind is not MoverKind.AUTO:
        return _both(kind, ends, f"by {kind.value}, as set")
    # Backups first: what a load then brings is what was there.
    backups, why_backups = _fastest(ends, clock, to_device=False)
    loads, why_loads = _fastest(ends, clock, to_device=True)
    return Chosen(loads, backups, f"loads by {why_loads}; backups by {why_backups}")


def _both(kind: MoverKind, ends: Ends, reason: str) -> Chosen:
    loads, backups = (_open(kind, ends, to_device=way) for way in (True, False))
    return Chosen(loads, backups, reason)


def _fastest(ends: Ends, clock: Clock, *, to_device: bool) -> tuple[Mover, str]:
    pages = _some_pages(ends)
    rates: dict[MoverKind, float] = {}
    movers: dict[MoverKind, Mover] = {}
    notes: list[str] = []
    for kind in _PREFERRED:
        try:
            movers[kind] = _open(kind, ends, to_device=to_device)
            rates[kind] = _rate(movers[kind], ends, pages, clock)
            notes.append(f"{kind.value} {rates[kind] / 1e9:.1f} GB/s")
        except ConfigError as error:
            notes.append(f"{kind.value}: {error}")
    best = pick(rates)
    return movers[best], f"{best.value} ({', '.join(notes)})"


def pick(rates: dict[MoverKind, float]) -> MoverKind:
    enough = _GOOD_ENOUGH * max(rates.values())
    return next(kind for kind in _PREFERRED if rates.get(kind, 0.0) >= enough)


def _open(kind: MoverKind, ends: Ends, *, to_device: bool) -> Mover:
    """Raises ConfigError with the reason why there is none."""
    if kind is MoverKind.KERNEL:
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("needs Triton")
        from quire.transfer.triton import KernelMover

        return KernelMover(ends, to_device=to_device)
    if kind is MoverKind.DMA:
        from quire.transfer.dma import DmaMover

        return DmaMover(ends, to_device=to_device)
    return IndexMover(ends, to_device=to_device)


def _some_pages(ends: Ends) -> tuple[Pages, Pages]:
    """Scattered, as after a day's work; the same at every call."""
    device, host = ends.device.num_pages, len(ends.host)
    count = min(device, host, max(1, _MEASURED_BYTES // ends.device.layout.page_bytes))
    chance = np.random.default_rng(0)
    there, here = (chance.permutation(most)[:count].astype(np.int32) for most in (device, host))
    return there, here


def _rate(mover: Mover, ends: Ends, pages: tuple[Pages, Pages], clock: Clock) -> float:
    """Bytes a second, launching included; the median."""
    layout = ends.device.layout
    group = min(layout.num_layers, mover.layers_at_once(len(pages[0])))
    seconds = []
    for _ in range(_REPEATS + 1):
        _wait(ends)
        began = clock()
        launch = mover.plan(*pages)
        for first in range(0, layout.num_layers, group):
            launch(range(first, min(first + group, layout.num_layers)))
        _wait(ends)
        seconds.append(clock() - began)
    # The first one compiles.
    return len(pages[0]) * layout.page_bytes / statistics.median(seconds[1:])


def _wait(ends: Ends) -> None:
    if ends.device.device.type == "cuda":
        torch.cuda.synchronize(ends.device.device)
