"""The example in the documentation runs as it is printed."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "embed.py"


def run(url: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), url],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout


def test_the_example_finds_in_its_second_run_what_the_first_left_in_the_store(tmp_path):
    url = f"file://{tmp_path}/store"
    assert run(url).startswith("0 of 20 pages reused")
    assert run(url).startswith("20 of 20 pages reused")


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 80
