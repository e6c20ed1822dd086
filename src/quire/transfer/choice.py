"""Which mover serves a direction: the fastest on this machine, for these pools, as measured, of
those that leave the model alone.

The copy engines come first: kernels that read or write over the link hold up the model's own, so
much that decoding beside them took twice as long, or more. Where pages are too short for them, a
kernel helps on the device; only where the copy engines are missing, or far below a plain copy of as
many bytes, kernels that use the link are measured at all.

A thread that launches is in the way of the one that launches the model: both want the driver and
the interpreter. On an H200, pieces of 128 KiB filled the link to 98 %, took up to half of the time
to launch, and made a step of 2 ms half again as long; rectangles of 4 MB filled it to 95 % and
cost the step 4 %. So a mover that takes long to launch is taken only if all do.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from quire.errors import ConfigError, WorkerError
from quire.transfer.kinds import MoverKind
from quire.transfer.movers import Ends, IndexMover, Mover, PageNumbers, groups
from quire.types import Clock

_MEASURED_BYTES = 512 << 20
_LEAST_BYTES = 64 << 20
"""Smaller pools say nothing, and are not measured."""
_REPEATS = 3
_KINDS = (
    ((MoverKind.RECTANGLES, MoverKind.PIECES), 0.9),
    ((MoverKind.STAGED,), 0.7),
    ((MoverKind.KERNEL, MoverKind.INDEX), 0.0),
)
"""Those that are compared, and the share of a plain copy's rate with which no more are."""
_LAUNCH_SHARE = 0.35
"""Of a copy's time, that launching it may take: long pieces take 15 to 28 % of it, short ones half
and more, beside an engine that has nothing to do."""


@dataclass(frozen=True, slots=True)
class Chosen:
    loads: Mover
    backups: Mover
    reason: str
    """For people."""


@dataclass(frozen=True, slots=True)
class _Measured:
    mover: Mover
    launch_s: float
    seconds: float
    """With that."""

    @property
    def launch_share(self) -> float:
        return self.launch_s / self.seconds


def choose(ends: Ends, kind: MoverKind, clock: Clock = time.perf_counter) -> Chosen:
    """Raises ConfigError if the mover asked for cannot serve these pools.

    Measuring leaves what the device pool holds as it was, and host pages overwritten.
    """
    if not len(ends.host):
        return _both(MoverKind.INDEX, ends, "no host pages, no copies")
    if kind is not MoverKind.AUTO:
        return _both(kind, ends, f"by {kind.value}, as set")
    with _stream(ends):
        # Backups first: what a load then brings is what was there.
        backups, why_backups = _fastest(ends, clock, to_device=False)
        loads, why_loads = _fastest(ends, clock, to_device=True)
    return Chosen(loads, backups, f"loads by {why_loads}; backups by {why_backups}")


def _both(kind: MoverKind, ends: Ends, reason: str) -> Chosen:
    loads, backups = (_open(kind, ends, to_device=way) for way in (True, False))
    return Chosen(loads, backups, reason)


def _fastest(ends: Ends, clock: Clock, *, to_device: bool) -> tuple[Mover, str]:
    pages = _some_pages(ends)
    size_bytes = len(pages[0]) * ends.device.layout.page_bytes
    if size_bytes < _LEAST_BYTES:
        return _first(ends, to_device=to_device)
    found: dict[MoverKind, _Measured] = {}
    plain = _plain_rate(ends, len(pages[0]), clock, to_device=to_device)
    notes = [f"plain {plain / 1e9:.1f} GB/s"]
    for kinds, good_enough in _KINDS:
        for kind in kinds:
            try:
                mover = _open(kind, ends, to_device=to_device)
                work = _work(mover, ends, pages, in_groups=to_device)
                found[kind] = one = _Measured(mover, *_seconds(work, ends, clock))
                rate = size_bytes / one.seconds / 1e9
                notes.append(f"{kind.value} {rate:.1f}, {one.launch_share:.0%} of it launching")
            except (ConfigError, WorkerError) as error:
                notes.append(f"{kind.value}: {error}")
        light = {kind: one for kind, one in found.items() if one.launch_share <= _LAUNCH_SHARE}
        if light and size_bytes >= good_enough * plain * min(x.seconds for x in light.values()):
            break
    best = min((light or found).items(), key=lambda item: item[1].seconds)
    return best[1].mover, f"{best[0].value} ({', '.join(notes)})"


def _first(ends: Ends, *, to_device: bool) -> tuple[Mover, str]:
    notes = ["too small to be measured"]
    for kind in (kind for kinds, _ in _KINDS for kind in kinds):
        try:
            return _open(kind, ends, to_device=to_device), f"{kind.value} ({', '.join(notes)})"
        except ConfigError as error:
            notes.append(f"{kind.value}: {error}")
    raise AssertionError("torch moves pages everywhere")


def _open(kind: MoverKind, ends: Ends, *, to_device: bool) -> Mover:
    """Raises ConfigError with the reason why there is none."""
    if kind in (MoverKind.KERNEL, MoverKind.STAGED) and importlib.util.find_spec("triton") is None:
        raise ConfigError("needs Triton")
    if kind is MoverKind.KERNEL:
        from quire.transfer.triton import KernelMover

        return KernelMover(ends, to_device=to_device)
    if kind is MoverKind.STAGED:
        from quire.transfer.staged import StagedMover

        return StagedMover(ends, to_device=to_device)
    if kind is MoverKind.RECTANGLES:
        from quire.transfer.dma import RectangleMover

        return RectangleMover(ends, to_device=to_device)
    if kind is MoverKind.PIECES:
        from quire.transfer.dma import PieceMover

        return PieceMover(ends, to_device=to_device)
    return IndexMover(ends, to_device=to_device)


def _some_pages(ends: Ends) -> tuple[PageNumbers, PageNumbers]:
    """Scattered, as after a day's work; the same at every call."""
    device, host = ends.device.num_pages, len(ends.host)
    count = min(device, host, max(1, _MEASURED_BYTES // ends.device.layout.page_bytes))
    chance = np.random.default_rng(0)
    there, here = (chance.permutation(most)[:count].astype(np.int32) for most in (device, host))
    return there, here


def _work(
    mover: Mover, ends: Ends, pages: tuple[PageNumbers, PageNumbers], *, in_groups: bool
) -> Callable[[], None]:
    """As the engine does it."""

    def work() -> None:
        move = mover.plan(*pages)
        every = range(ends.device.layout.num_layers)
        for layers in groups(every, move.group if in_groups else None):
            move.launch(layers)

    return work


def _plain_rate(ends: Ends, num_pages: int, clock: Clock, *, to_device: bool) -> float:
    """Of as many host pages in one piece, and memory of no pool."""
    host = ends.host_bytes[:num_pages]
    device = torch.empty(host.shape, dtype=host.dtype, device=ends.device.device)
    source, target = (host, device) if to_device else (device, host)
    _, seconds = _seconds(lambda: target.copy_(source, non_blocking=True), ends, clock)
    return host.nbytes / seconds


def _seconds(act: Callable[[], object], ends: Ends, clock: Clock) -> tuple[float, float]:
    """To launch it, and until it is done; the best of some. The first time does not count, and
    what others did to one of them says nothing of the mover."""
    launches, seconds = [], []
    for _ in range(_REPEATS + 1):
        _wait(ends)
        began = clock()
        act()
        launches.append(clock() - began)
        _wait(ends)
        seconds.append(clock() - began)
    return min(launches[1:]), min(seconds[1:])


def _stream(ends: Ends) -> AbstractContextManager[object]:
    """One of its own: the copy engines serve no other, and nothing else is waited for."""
    where = ends.device.device
    if where.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(where))  # type: ignore[no-untyped-call]


def _wait(ends: Ends) -> None:
    if ends.device.device.type == "cuda":
        torch.cuda.synchronize(ends.device.device)
