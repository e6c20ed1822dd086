"""How a server begins and ends: ports, signals, and an engine that dies."""

import os
import signal
import socket
import threading

import httpx
import pytest

from e2e.server.harness import MODEL, TIMEOUT_S, ServerProcess, is_running, running
from e2e.serving.server import wait_until

LONG = {"model": MODEL, "prompt": "1 2 3", "max_tokens": 900, "ignore_eos": True, "stream": True}


class Reading(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, url: str, body: dict) -> None:
        super().__init__()
        self._url, self._body = url, body
        self.lines: list[str] = []
        self.status = 0
        self.start()

    def run(self) -> None:
        with httpx.stream(
            "POST", self._url + "/v1/completions", json=self._body, timeout=TIMEOUT_S
        ) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                self.lines += [line] if line else []


def test_a_port_in_use_is_said_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess({"model": "/no/such/model"}, {"port": port}) as process:
            assert process.wait() == 2
            assert f"cannot listen on 127.0.0.1:{port}" in process.log()


def test_a_signal_while_it_starts_ends_it():
    with ServerProcess({}, {}) as process:
        engine = process.wait_engine()
        assert process.stop(signal.SIGINT) == 0
        assert not is_running(engine)
        assert "Traceback" not in process.log()


def test_told_to_terminate_it_finishes_what_runs_and_takes_nothing_new():
    with running() as process:
        long = Reading(process.url, LONG | {"max_tokens": 60})
        wait_until(lambda: long.lines, "the stream has begun")
        process.process.send_signal(signal.SIGTERM)
        with process.client() as client:
            wait_until(lambda: client.get("/ready").status_code == 503, "it drains")
            assert client.get("/health").json()["draining"] is True
            response = client.post("/v1/completions", json=LONG)
            assert (response.status_code, response.json()["error"]["code"]) == (
                503,
                "shutting_down",
            )
        assert process.wait() == 0
        long.join()
        assert long.lines[-1] == "data: [DONE]"


@pytest.mark.long
def test_a_second_signal_ends_it_soon():
    with running(server={"shutdown_grace_s": 0.1}) as process:
        long = Reading(process.url, LONG)
        wait_until(lambda: long.lines, "the stream has begun")
        process.process.send_signal(signal.SIGTERM)
        with process.client() as client:
            wait_until(lambda: client.get("/ready").status_code == 503, "it drains")
        assert process.stop() == 0
        long.join()
        assert '"shutting_down"' in long.lines[-1]


def test_ctrl_c_ends_it_after_what_it_was_doing():
    """Short requests finish; long ones are told that it is over; the engine goes too. What is short
    depends on the machine: on a slow one it takes more grace."""
    assert any(short_one_finishes(grace_s) for grace_s in (1.0, 5.0, 25.0))


def short_one_finishes(grace_s):
    server = {"shutdown_grace_s": grace_s, "host": "0.0.0.0"}
    with running(server=server) as process:
        assert "without an API key" in process.log()
        engine = process.wait_engine()
        long = Reading(process.url, LONG)
        wait_until(lambda: long.lines, "the stream has begun")
        short = Reading(process.url, LONG | {"max_tokens": 3})
        wait_until(lambda: short.status, "the short one has begun")
        assert process.stop(signal.SIGINT) == 0
        short.join()
        long.join()
        assert '"shutting_down"' in long.lines[-1]
        assert not is_running(engine)
        assert "Traceback" not in process.log()
        return short.lines[-1] == "data: [DONE]"


def test_an_engine_that_dies_ends_it_with_a_message():
    with running() as process:
        long = Reading(process.url, LONG)
        wait_until(lambda: long.lines, "the stream has begun")
        os.kill(process.wait_engine(), signal.SIGKILL)
        assert process.wait() == 1
        long.join()
        assert '"engine_unavailable"' in long.lines[-1]
        assert "was killed by signal 9" in process.log()
        assert "Traceback" not in process.log()
