"""What the copy engines are told to do, done by hand: the same bytes, and no others."""

import ctypes
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.memory.device import DevicePool
from quire.transfer import dma
from quire.transfer.dma import PieceMover, RectangleMover
from quire.transfer.driver import DEVICE, HOST
from transfer_cases import LAYOUTS, Pools, check_mover

SEEDS = range(4)


class Engines:
    """In place of the driver."""

    def __init__(self):
        self.rectangles = []
        self.num_pieces = []

    def copy_rectangles(self, rectangles, stream):
        for one in rectangles:
            self.rectangles.append((int(one["width"]), int(one["height"])))
            assert {int(one[side]["kind"]) for side in ("source", "target")} == {HOST, DEVICE}
            ends = [self._address(one[side]) for side in ("source", "target")]
            for row in range(int(one["height"])):
                (source, from_pitch), (target, to_pitch) = ends
                width = int(one["width"])
                assert width <= min(from_pitch, to_pitch)
                ctypes.memmove(target + row * to_pitch, source + row * from_pitch, width)

    def copy_pieces(self, sources, targets, size_bytes, stream):
        assert sources.dtype == targets.dtype == np.uint64
        self.num_pieces.append(len(sources))
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, source, size_bytes)

    @staticmethod
    def _address(side):
        name = "host" if side["kind"] == HOST else "device"
        return int(side[name]), int(side["pitch"])


@pytest.fixture
def engines(monkeypatch):
    engines = Engines()
    for name in ("copy_rectangles", "copy_pieces"):
        monkeypatch.setattr(dma, name, getattr(engines, name))
    for name in ("rectangle_copy", "piece_copy"):
        monkeypatch.setattr(dma, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return engines


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pages_as_rectangles(layout, seed, engines):
    check_mover(RectangleMover, layout, "cpu", seed, groups=2)
    assert {width for width, _ in engines.rectangles} == {layout.chunk_bytes}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_runs_of_pages_as_rectangles(layout, seed, engines):
    check_mover(partial(RectangleMover, rectangle_bytes=1), layout, "cpu", seed, groups=2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pieces(layout, seed, engines):
    check_mover(PieceMover, layout, "cpu", seed, groups=2)


def test_pages_in_order_are_one_rectangle_per_plane_and_go_layer_by_layer(engines):
    layout = LAYOUTS[0]
    mover = RectangleMover(
        Pools(layout, "cpu", 0).ends(), to_device=True, rectangle_bytes=4 * layout.chunk_bytes
    )
    order = np.arange(8, dtype=np.int32)
    move = mover.plan(order, order + 2)
    assert move.group == 1
    move.launch(range(1, 2))
    assert engines.rectangles == [(layout.chunk_bytes, 8)] * layout.num_planes
    scattered = mover.plan(order[::-1].copy(), order)
    scattered.launch(range(4))
    assert engines.rectangles[2:] == [(layout.chunk_bytes, 4 * layout.num_planes)] * 8


def test_no_rectangle_crosses_from_one_pinned_slice_into_the_next(engines):
    """The driver refuses a copy that begins in one registration and ends in another."""
    layout = LAYOUTS[0]
    ends = replace(Pools(layout, "cpu", 0).ends(), slice_pages=4)
    mover = RectangleMover(ends, to_device=True, rectangle_bytes=layout.chunk_bytes)
    order = np.arange(8, dtype=np.int32)
    mover.plan(order, order + 2).launch(range(1))
    assert [height for _, height in engines.rectangles] == [2, 4, 2] * layout.num_planes


@pytest.mark.parametrize(("kib", "group"), [(1, 1), (16, 1), (32, 2), (64, 4), (1000, 4)])
def test_layers_of_a_page_go_together_until_they_are_worth_a_command(kib, group, engines):
    layout = LAYOUTS[0]  # 16 KiB a layer, 4 of them
    ends = Pools(layout, "cpu", 0).ends()
    mover = RectangleMover(ends, to_device=True, rectangle_bytes=kib << 10)
    one = np.zeros(1, np.int32)
    assert mover.plan(one, one).group == group


def test_planes_that_are_not_evenly_spaced_are_refused(engines):
    layout = LAYOUTS[0]
    pools = Pools(layout, "cpu", 0)
    gaps = torch.zeros(16, 4, *layout.inner_shape)
    planes = [[gaps[2 * i], gaps[2 * i + 1 + (i == 3)]] for i in range(4)]
    ends = pools.ends()
    uneven = type(ends)(DevicePool(layout, planes), ends.host, ends.host_bytes)
    with pytest.raises(ConfigError, match="evenly"):
        RectangleMover(uneven, to_device=True)
    PieceMover(uneven, to_device=True)


def test_a_machine_without_the_driver_says_so():
    with pytest.raises(ConfigError, match="driver"):
        PieceMover(Pools(LAYOUTS[0], "cpu", 0).ends(), to_device=True)
