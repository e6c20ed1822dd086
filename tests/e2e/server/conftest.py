from collections.abc import Iterator

import httpx
import openai
import pytest

from e2e.server.harness import API_KEY, TIMEOUT_S, ServerProcess, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as they found it."""
    store = tmp_path_factory.mktemp("store")
    engine = {"store": f"file://{store}?max=200MB", "prefetch_policy": "wait_complete"}
    options = {
        "api_key": API_KEY,
        # Not so short that a test which is not meant ever is as slow.
        "head_timeout_s": 5.0,
        "body_timeout_s": 5.0,
        "max_body_bytes": 1 << 20,
    }
    with running(engine, options) as process:
        yield process


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key=API_KEY, max_retries=0, timeout=TIMEOUT_S
    ) as client:
        yield client


@pytest.fixture(autouse=True)
def _still_good(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the shared server, a good request is answered afterwards."""
    yield
    if "server" in request.fixturenames:
        http = request.getfixturevalue("server").client()
        with http:
            body = {"model": "SmolLM2-135M-Instruct", "prompt": "x", "max_tokens": 1}
            assert http.post("/v1/completions", json=body).status_code == 200
