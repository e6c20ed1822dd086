"""What the tests inside the real vLLM share: its engines, two models, what vLLM answers alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemma import gemma_model
from quire.models import embedded_model
from vllm_engines import LONG, MANY, SETTLE, Engines, Subject, ask


@pytest.fixture(scope="session", autouse=True)
def _is_installed() -> None:
    environment = Path(os.environ["QUIRE_VLLM_PYTHON"]).parents[1]
    if not (environment / ".installed-vllm").exists():
        pytest.skip(f"vLLM is not in {environment}: `make test-vllm` says why it could not be")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def small(engines: Engines) -> Subject:
    """The embedded model."""
    return _subject(engines, str(embedded_model()))


@pytest.fixture(scope="session")
def windows(engines: Engines) -> Subject:
    """Gemma-3-270m: windows of 512 tokens in five layers of six."""
    return _subject(engines, str(gemma_model()))


@pytest.fixture(scope="session", params=["small", "windows"])
def subject(request: pytest.FixtureRequest) -> Subject:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Subject)
    return found


def _subject(engines: Engines, model: str) -> Subject:
    long, many, end = engines.vllm(model, [ask(LONG), ask(*MANY), SETTLE])
    return Subject(model, long["tokens"], many["tokens"], end["groups"])
