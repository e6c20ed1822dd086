from pathlib import Path

import pytest

from e2e.serving.oracle import Oracle
from quire.models import embedded_model


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """Of the model that comes with Quire."""
    return Oracle(embedded_model())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where a server's store will be; it makes the directory itself."""
    return tmp_path / "store"
