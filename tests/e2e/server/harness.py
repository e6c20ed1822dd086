"""Starts, watches and stops real servers for these tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx

from e2e.serving.server import wait_until
from quire.models import embedded_model

RUNNER = Path(__file__).with_name("runner.py")
MODEL = "SmolLM2-135M-Instruct"
API_KEY = "sk-test"
TIMEOUT_S = 300.0
"""For anything: so that a broken test ends."""
MAX_CONTEXT = 1024


class ServerProcess:
    """Use it in a `with`."""

    def __init__(self, engine: dict[str, Any], server: dict[str, Any]) -> None:
        base = {
            "model": str(embedded_model()),
            "name": MODEL,
            "device_bytes": 128 << 20,
            "host_bytes": 64 << 20,
            "max_context": MAX_CONTEXT,
            "max_running": 4,
            "max_waiting": 12,
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed on exit
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(RUNNER),
                json.dumps(base | engine),
                json.dumps({"port": 0, "admin_key": API_KEY} | server),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    def wait_ready(self) -> None:
        """Its first line on stdout says where it is; no line means that it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("READY "), self.log()
        self.url = line.split()[1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_engine(self) -> int:
        """The process id of the engine, the server's child, as soon as there is one."""
        wait_until(self._engine_pids, "the engine's process is there")
        return self._engine_pids()[0]

    def _engine_pids(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    command = (entry / "cmdline").read_bytes()
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    if parent == self.process.pid and b"quire.engine.process" in command:
                        found.append(int(entry.name))
        return found

    def client(self, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, **options)


@contextlib.contextmanager
def running(
    engine: dict[str, Any] | None = None, server: dict[str, Any] | None = None
) -> Iterator[ServerProcess]:
    with ServerProcess(engine or {}, server or {}) as process:
        process.wait_ready()
        yield process


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
