"""Bad input against the real server. After every test a good request is still answered."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from e2e.server.harness import API_KEY, MODEL, TIMEOUT_S, ServerProcess
from e2e.serving.server import wait_until
from unit.server.bodies import bodies, posted

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GOOD = {"model": MODEL, "prompt": "1 2 3", "max_tokens": 1}
HEAD = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    f"Authorization: Bearer {API_KEY}\r\n"
).encode()


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def exchange(server: ServerProcess, data: bytes) -> bytes:
    """Send bytes, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                answer += piece
    return bytes(answer)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1", b"null", b"\x00\xff", b"[" * 100_000, b'{"model":"\\ud800"}']
)
def test_malformed_json(http, body):
    response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("salt", ["", " ", "a\r\nb", "a" * 1000, "é", "\u0000", 7, ["a"], {}])
def test_hostile_salts(http, salt):
    response = http.post(COMPLETIONS, json=GOOD | {"cache_salt": salt})
    assert response.status_code == 400
    assert error_of(response)["param"] == "cache_salt"


@pytest.mark.parametrize("salt", ["../../etc/passwd", "%00", "'; drop table", "{}", "!~"])
def test_strange_salts_are_only_salts(http, salt):
    body = GOOD | {"cache_salt": salt.replace(" ", "_")}
    assert http.post(COMPLETIONS, json=body).status_code == 200


def test_a_huge_prompt(http):
    response = http.post(COMPLETIONS, json=GOOD | {"prompt": "x" * 2_000_000})
    assert response.status_code == 413
    response = http.post(COMPLETIONS, json=GOOD | {"prompt": "word " * 150_000})
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    response = http.post(COMPLETIONS, json=GOOD | {"prompt": [1] * 200_000})
    assert error_of(response)["code"] == "context_length_exceeded"


def test_paths_methods_and_types(http):
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/v1/../etc/passwd", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", CHAT, 405),
    ):
        response = http.request(method, path)
        assert response.status_code == status
        error_of(response)
    response = http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert response.status_code == 415


def test_no_key(server):
    response = httpx.post(server.url + COMPLETIONS, json=GOOD, timeout=TIMEOUT_S)
    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 4,
        bytes(1000) + b"\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.0\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nnot a chunk\r\n",
    ],
)
def test_junk_on_the_socket(server, data):
    answer = exchange(server, data)
    assert answer.split()[1] == b"400"
    assert b'{"error":' in answer


def test_a_head_too_large(server):
    answer = exchange(server, b"GET / HTTP/1.1\r\nA: " + b"x" * 1_000_000)
    assert answer.split()[1] == b"431"


def test_slow_heads_and_bodies(server):
    """Many at once, and a good request in the middle of them."""
    slow = [b"", b"GET /health HT", HEAD, HEAD + b"Content-Length: 50\r\n\r\n{"] * 4
    answers: list[bytes] = []
    threads = [
        threading.Thread(target=lambda data=data: answers.append(exchange(server, data)))
        for data in slow
    ]
    for thread in threads:
        thread.start()
    with server.client() as http:
        assert http.post(COMPLETIONS, json=GOOD).status_code == 200
    for thread in threads:
        thread.join()
    assert [answer.split()[1] for answer in answers] == [b"408"] * len(slow)


def running(server: ServerProcess) -> int:
    with server.client() as http:
        status = http.get("/admin/cache").json()
    return status["running"] + status["waiting"]


@contextlib.contextmanager
def posting(server: ServerProcess, body: dict) -> Iterator[None]:
    """A client that has posted, and waits; it leaves with the block."""
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(HEAD + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


LONG = GOOD | {"max_tokens": 900, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(server, stream):
    with posting(server, LONG | {"stream": stream, "n": 2}):
        wait_until(lambda: running(server) == 2, "both choices run")
    wait_until(lambda: running(server) == 0, "both were aborted")


def test_more_requests_than_there_is_room_for(server, http):
    """16 sequences have room; the 17th is told so, and why."""
    with contextlib.ExitStack() as clients:
        for num_sequences in (8, 16):
            clients.enter_context(posting(server, LONG | {"n": 8}))
            wait_until(lambda n=num_sequences: running(server) == n, "they are in the engine")
        response = http.post(COMPLETIONS, json=GOOD)
        assert response.status_code == 429
        assert error_of(response)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
    wait_until(lambda: running(server) == 0, "all were aborted")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_any_body_gets_an_answer(server, http, path):
    """Also one that asks for more tokens, or for less time, than this machine can give."""
    schema = posted(http.get("/openapi.json").json())[path]

    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(bodies(schema, {"model": MODEL, "max_tokens": 2, "n": 1, "timeout": 5}))
    def answered(body):
        response = http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 404, 504), response.text
        if response.status_code != 200:
            error_of(response)

    answered()
    assert "quire_unexpected_errors_total 0.0" in http.get("/metrics").text


def test_nothing_was_logged_that_should_not_be(server):
    assert "Traceback" not in server.log()
