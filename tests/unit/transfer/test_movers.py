"""Movers are exact: torch's anywhere, our kernel in Triton's interpreter."""

import numpy as np
import pytest

from kernel_cases import interpreted
from quire.transfer.movers import IndexMover
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
