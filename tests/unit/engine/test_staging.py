"""Staging where host and device are one."""

import pytest
import torch

from quire.engine.attention.staging import Staging
from staging_cases import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_staging(check):
    check(Staging(torch.device("cpu")))
