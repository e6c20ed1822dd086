"""Staging on a real device, and that no copy engine has a part in it."""

import warnings

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler itself
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            staging.receive(staging.send([np.arange(10)])[0]).wait()
            torch.ones(1, device="cuda").cpu()
    names = [event.name().lower() for event in found.profiler.kineto_results.events()]
    copies = [name for name in names if name.startswith("memcpy")]
    assert copies == ["memcpy dtoh (device -> pageable)"], names
