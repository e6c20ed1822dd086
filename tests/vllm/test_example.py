"""The example of docs/vllm.md, as it stands: what it says was not computed, in two lives."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from quire.models import embedded_model
from vllm_engines import vllm_environment

EXAMPLE = Path(__file__).parents[2] / "examples/vllm_quire.py"
LIMIT_S = 600


def run_example(store: Path) -> list[tuple[int, int]]:
    """Of each question, the tokens that were not computed, and all of them."""
    environment = vllm_environment(
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
    )
    command = [os.environ["QUIRE_VLLM_PYTHON"], str(EXAMPLE), str(embedded_model())]
    done = subprocess.run(
        [*command, f"file://{store}?max=1GiB"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-10_000:]
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) tokens", done.stdout)]


@pytest.mark.long
def test_the_example_finds_its_text_again_also_in_its_second_life(tmp_path: Path) -> None:
    (first, _), (again, total) = run_example(tmp_path)
    assert first == 0
    assert again > total // 2
    assert [reused > total // 2 for reused, _ in run_example(tmp_path)] == [True, True]
