"""For all tests: how models use the cores, and who runs beside whom."""

import os
from pathlib import Path

import pytest

# Before anything imports torch: see quire.engine.startup.model_environment.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

_E2E = Path(__file__).parent / "e2e"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` has two processes. What runs models and servers goes to one of them, in order:
    it shares what it has loaded, and two such at a time would only be in each other's way."""
    for item in items:
        if _E2E in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("e2e"))
