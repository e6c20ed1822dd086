"""Pages of one worker's host pool on another's CUDA device, by each transport, to the byte."""

import pytest
import torch

from evidence.pd import bytes as bytes_moved
from quire.memory.page_layout import PageLayout
from quire.peer.kinds import TransportKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("kind", [TransportKind.TCP, TransportKind.SHM])
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_come_to_the_device_as_they_were(kind, page_size):
    layout = PageLayout("full", 4, 8, 128, "bfloat16", page_size)
    plan = bytes_moved.Plan(layout, 100, "cuda", rounds=3)
    (found,) = bytes_moved.measure(plan, [kind]).values()
    assert found["bytes"] == 100 * layout.page_bytes
