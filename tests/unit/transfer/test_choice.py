"""Which mover is taken: the fastest, or one that is nearly as fast and leaves the model alone."""

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.transfer.choice import choose, pick
from quire.transfer.kinds import MoverKind
from quire.transfer.movers import Ends
from transfer_cases import LAYOUTS, Pools

DMA, KERNEL, INDEX = MoverKind.DMA, MoverKind.KERNEL, MoverKind.INDEX


@pytest.mark.parametrize(
    ("rates", "taken"),
    [
        ({DMA: 54.0, KERNEL: 52.0, INDEX: 40.0}, DMA),
        ({DMA: 51.5, KERNEL: 54.0, INDEX: 40.0}, DMA),  # nearly as fast
        ({DMA: 30.0, KERNEL: 52.0, INDEX: 40.0}, KERNEL),
        ({KERNEL: 39.0, INDEX: 40.0}, KERNEL),
        ({INDEX: 40.0}, INDEX),
    ],
)
def test_the_fastest_unless_a_better_one_is_nearly_as_fast(rates, taken):
    assert pick(rates) is taken


def test_without_driver_and_triton_torch_moves_them_and_the_reason_says_so():
    """As here, or with Triton's interpreter, which is slower than torch."""
    chosen = choose(Pools(LAYOUTS[0], "cpu", 0).ends(), MoverKind.AUTO)
    assert chosen.backups.kind in (INDEX, KERNEL)
    assert "dma: the driver's library cannot be used" in chosen.reason
    assert "index" in chosen.reason


def test_measuring_leaves_the_device_as_it_was():
    pools = Pools(LAYOUTS[0], "cpu", 1)
    pools.fill_device()
    before = pools.device_bytes()
    choose(pools.ends(), MoverKind.AUTO)
    assert torch.equal(pools.device_bytes(), before)


def test_one_that_was_asked_for_is_taken_or_refused():
    ends = Pools(LAYOUTS[0], "cpu", 0).ends()
    assert choose(ends, INDEX).reason == "by index, as set"
    with pytest.raises(ConfigError, match="driver"):
        choose(ends, DMA)


def test_without_host_pages_nothing_is_measured():
    ends = Pools(LAYOUTS[0], "cpu", 0).ends()
    none = Ends(ends.device, ends.host[:0])
    assert choose(none, MoverKind.AUTO).reason == "no host pages, no copies"


def test_what_is_measured_is_scattered_over_both_pools():
    from quire.transfer.choice import _some_pages

    there, here = _some_pages(Pools(LAYOUTS[0], "cpu", 0).ends())
    assert len(there) == len(here) == len(np.unique(there)) == len(np.unique(here))
