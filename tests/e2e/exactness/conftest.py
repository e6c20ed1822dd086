from pathlib import Path

import pytest


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?max=2GiB"
