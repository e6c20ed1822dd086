"""Movers are exact: torch's anywhere, our kernel in Triton's interpreter."""

import ctypes
from functools import partial

import numpy as np
import pytest

from kernel_cases import interpreted
from quire.errors import WorkerError
from quire.transfer.movers import IndexMover, portions
from transfer_cases import LAYOUTS, Pools, check_mover

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_index_mover(layout, seed):
    check_mover(IndexMover, layout, "cpu", seed, groups=2)


class TestKernelMover:
    pytestmark = interpreted

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_it_moves_these_bytes_and_no_others(self, layout, seed):
        from quire.transfer.triton import KernelMover

        check_mover(KernelMover, layout, "cpu", seed, groups=2)

    @pytest.mark.parametrize("programs", [1, 3, 64])
    def test_however_many_programs_there_are(self, programs):
        from quire.transfer.triton import KernelMover

        def few(ends, *, to_device):
            return KernelMover(ends, to_device=to_device, programs=programs, block_bytes=256)

        check_mover(few, LAYOUTS[1], "cpu", 7, groups=3)

    def test_large_copies_are_launched_layer_by_layer_and_small_ones_at_once(self):
        from quire.transfer.triton import KernelMover

        pools = Pools(LAYOUTS[0], "cpu", 0)
        mover = KernelMover(pools.ends(), to_device=True)
        one, many = (np.zeros(count, np.int32) for count in (1, 100_000))
        assert mover.plan(one, one).group > 4
        assert mover.plan(many, many).group == 1


@pytest.mark.parametrize("most", [1, 7, 8, 32, 100])
@pytest.mark.parametrize("count", [0, 1, 5, 31, 32, 33, 512, 1000])
def test_portions_are_all_of_it_in_order_and_small_at_both_ends(count, most):
    found = list(portions(count, most))
    assert [i for some in found for i in range(count)[some]] == list(range(count))
    sizes = [some.stop - some.start for some in found]
    assert max(sizes, default=0) <= most
    if count >= 4 * most:
        assert max(sizes) == most
        assert sizes[-1] <= sizes[0] == max(1, most // 8)


class TestStagedMover:
    pytestmark = interpreted

    @pytest.fixture(autouse=True)
    def by_hand(self, monkeypatch):
        """In place of the driver: pieces, each as long as `sizes` says."""
        from quire.transfer import staged

        self.sizes = []

        def copy_pieces(sources, targets, size_bytes, stream):
            assert sources.dtype == targets.dtype == np.uint64
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                ctypes.memmove(target, source, size_bytes)
                self.sizes.append(size_bytes)

        monkeypatch.setattr(staged, "copy_pieces", copy_pieces)
        monkeypatch.setattr(staged, "piece_copy", lambda: None)

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_it_moves_these_bytes_and_no_others(self, layout, seed):
        from quire.transfer.staged import StagedMover

        check_mover(StagedMover, layout, "cpu", seed, groups=2)

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_with_buffers_that_hold_a_page_or_two(self, layout, seed):
        from quire.transfer.staged import StagedMover

        layer = layout.num_planes * layout.chunk_bytes
        small = partial(StagedMover, piece_bytes=2 * layer, buffer_bytes=5 * layer)
        check_mover(small, layout, "cpu", seed, groups=2)
        assert max(self.sizes) <= 2 * layer

    def test_layers_of_a_page_are_one_piece(self):
        from quire.transfer.staged import StagedMover

        layout = LAYOUTS[0]
        layer = layout.num_planes * layout.chunk_bytes
        mover = StagedMover(
            Pools(layout, "cpu", 0).ends(), to_device=True, piece_bytes=2 * layer, buffer_bytes=0
        )
        pages = np.arange(4, dtype=np.int32)
        mover.plan(pages, pages[::-1].copy()).launch(range(4))
        assert self.sizes == [2 * layer] * 8

    def test_what_was_launched_is_waited_for_when_the_rest_is_refused(self, monkeypatch):
        from quire.transfer import staged

        joined = []

        def lead(buffer):
            joined.append(buffer)

        def refuse(*_):
            raise WorkerError("refused")

        monkeypatch.setattr(staged._Buffer, "lead", lead)

        monkeypatch.setattr(staged, "copy_pieces", refuse)
        mover = staged.StagedMover(Pools(LAYOUTS[0], "cpu", 0).ends(), to_device=True)
        pages = np.arange(4, dtype=np.int32)
        with pytest.raises(WorkerError, match="refused"):
            mover.plan(pages, pages).launch(range(4))
        assert len(joined) == 2
