"""A tiny random model, as a GGUF file and converted."""

import pytest

from quire.models.gguf import convert_gguf
from unit.models.tiny import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def conversion(tiny_gguf, tmp_path_factory):
    """(directory, what was reported while it was made)"""
    reports = []
    cache = tmp_path_factory.mktemp("cache")
    return convert_gguf(tiny_gguf, cache, lambda *report: reports.append(report)), reports


@pytest.fixture(scope="session")
def tiny_model(conversion):
    """Do not change it: copy it."""
    return conversion[0]
