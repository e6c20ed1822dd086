"""Many threads read from peers that leave. In processes of their own: a crash is a failed test."""

from __future__ import annotations

import subprocess
import sys

import pytest

import reading_under_stress

LIMIT_S = 600.0
"""Only how long a broken test takes to fail."""


def played(*options: str) -> subprocess.CompletedProcess[str]:
    # -P: what lies beside it is not to be taken for packages of the same name.
    command = [sys.executable, "-P", "-X", "faulthandler", reading_under_stress.__file__, *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)


def test_reads_end_once_and_rightly_whoever_leaves() -> None:
    ran = played("--seed", "1", "--rounds", "10")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_the_same_for_longer(seed: int) -> None:
    ran = played("--seed", str(seed), "--rounds", "100")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.long
def test_the_same_of_peers_that_are_killed() -> None:
    ran = played("--seed", "1", "--rounds", "20", "--kill")
    assert ran.returncode == 0, ran.stderr


def test_a_fetch_that_ends_while_somebody_copies_is_noticed() -> None:
    ran = played("--seed", "1", "--rounds", "10", "--sabotage")
    assert ran.returncode != 0
    assert "AssertionError" in ran.stderr
