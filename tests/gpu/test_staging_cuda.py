"""Staging on a real device, and that no copy engine has a part in it."""

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from quire.engine.attention.staging import Staging
from staging_cases import CHECKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_staging(check):
    check(Staging(torch.device("cuda")))


def test_no_copy_engine_has_a_part_in_it():
    """There small arrays would wait for whatever large copies are under way."""
    staging = Staging(torch.device("cuda"))
    staging.receive(staging.send([np.arange(10)])[0]).wait()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        staging.receive(staging.send([np.arange(10)])[0]).wait()
    names = [event.name for event in found.events()]
    assert names
    assert not [name for name in names if "memcpy" in name.lower()]
