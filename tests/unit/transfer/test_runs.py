"""Pairs of pages as runs: nothing lost, nothing twice, and the bytes the same either way."""

from contextlib import closing

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.memory.page_layout import PageLayout
from quire.transfer.cpu import CpuCopyEngine
from quire.transfer.directed import Rows, runs
from quire.types import page_ids

NUM_PAGES = 40


@st.composite
def pairs(draw):
    """Distinct pages on both sides, partly in order, forwards or backwards."""
    source: list[int] = []
    target: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        first = draw(st.integers(0, NUM_PAGES - 1))
        count = draw(st.integers(1, 10))
        to = draw(st.integers(0, NUM_PAGES - 1))
        step = draw(st.sampled_from([1, -1]))
        for i in range(count):
            page, place = first + step * i, to + step * i
            fresh = page not in source and place not in target
            if fresh and 0 <= page < NUM_PAGES and 0 <= place < NUM_PAGES:
                source.append(page)
                target.append(place)
    return source, target


@given(pairs())
def test_runs_are_the_same_pairs(pages):
    source, target = (np.array(side, dtype=np.int32) for side in pages)
    pieces = runs(source, target)
    together = {(a + i, b + i) for a, b, count in pieces for i in range(count)}
    assert together == set(zip(*pages, strict=True))
    assert sum(piece.length for piece in pieces) == len(source)


def test_pages_in_reverse_are_one_run():
    down = np.arange(9, 2, -1, dtype=np.int32)
    assert runs(down, down + 20) == [Rows(3, 23, 7)]


@given(pairs())
def test_a_copy_there_and_back_brings_every_byte(pages):
    layout = PageLayout("full", 2, 1, 4, "float32", 4)
    device = DevicePool.allocate(layout, NUM_PAGES)
    for layer in range(2):
        for plane in device.planes(layer):
            plane.copy_(torch.arange(plane.numel()).view_as(plane) + 1000 * layer)
    before = [plane.clone() for layer in range(2) for plane in device.planes(layer)]
    source, target = (page_ids(side) for side in pages)
    with closing(HostPool(layout, NUM_PAGES)) as host:
        engine = CpuCopyEngine(device, host)
        try:
            engine.backup(source, target).wait()
            for layer in range(2):
                for plane in device.planes(layer):
                    plane[pages[0]] = -1
            engine.load(target, source).wait()
        finally:
            engine.close()
    after = [plane for layer in range(2) for plane in device.planes(layer)]
    assert all(map(torch.equal, before, after))
