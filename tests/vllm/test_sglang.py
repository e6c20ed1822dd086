"""Quire's stores behind SGLang's own storage code, which needs no GPU: see sglang_trial.py."""

import os
import subprocess
from pathlib import Path

from vllm_engines import vllm_environment

HERE = Path(__file__).parent


def test_sglang_finds_in_our_stores_what_it_kept_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [os.environ["QUIRE_VLLM_PYTHON"], str(HERE / "sglang_trial.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=vllm_environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
