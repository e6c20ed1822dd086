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


def test_the_example_shows_a_hit_in_one_run_and_in_the_next_one_from_the_store(tmp_path):
    url = f"file://{tmp_path}/store"
    first, second = run(url).splitlines()
    assert first.startswith("request-1: 0 of 20 pages reused")
    assert second.startswith("request-2: 20 of 20 pages reused")
    assert run(url).startswith("request-1: 20 of 20 pages reused")


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 80
