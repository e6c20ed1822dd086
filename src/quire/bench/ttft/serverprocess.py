"""A real `quire serve` in a process of its own: start it, wait until it is ready, stop it.

    with ServerProcess.start(["--host-memory", "0"], folder=folder) as server:
        httpx.get(f"{server.url}/v1/models")

The caller's own QUIRE_ options do not reach it: what is measured is what the arguments say.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from quire.errors import EngineError
from quire.settings import OPTIONS
from quire.settings.sources import CONFIG_VARIABLE

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1
_LAST_LINES = 12


class ServerProcess(contextlib.AbstractContextManager["ServerProcess"]):
    """Build it with `start`."""

    def __init__(
        self, process: subprocess.Popen[bytes], url: str, admin_key: str, log: Path
    ) -> None:
        self.url = url
        self.admin_key = admin_key
        self.log = log
        """All that it prints."""
        self._process = process

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        *,
        folder: Path,
        options: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
        waiting: Callable[[], None] = lambda: None,
    ) -> ServerProcess:
        """`arguments` are flags of `quire serve`; `options` are set through the environment.

        `folder` keeps its log. Raises EngineError, with the last lines of the log, when it ends or
        is not ready in time.
        """
        port = free_port()
        admin_key = secrets.token_hex(16)
        given = {OPTIONS[name].variable: value for name, value in (options or {}).items()}
        log = folder / f"server-{port}.log"
        command = [sys.executable, "-m", "quire.cli", "serve", "--port", str(port), *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_environment(), OPTIONS["admin_key"].variable: admin_key, **given},
                start_new_session=True,  # Ctrl-C is ours: we stop it ourselves
            )
        server = cls(process, f"http://127.0.0.1:{port}", admin_key, log)
        try:
            server._wait_ready(timeout_s, waiting)
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> int:
        """Ask it to stop, then make it; its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        if self._process.poll() is None:
            self._process.kill()
        return self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_ready(self, timeout_s: float, waiting: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineError(
                    f"the server ended with code {self._process.returncode} before it was ready:\n"
                    f"{self._last_words()}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/ready", timeout=5.0).status_code == httpx.codes.OK:
                    return
            waiting()
            time.sleep(_POLL_S)
        raise EngineError(f"the server was not ready within {timeout_s:g} s:\n{self._last_words()}")

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:])


def free_port() -> int:
    """Free a moment ago; somebody could take it before we do, and then the start fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    ours = {option.variable for option in OPTIONS.values()} | {CONFIG_VARIABLE}
    return {name: value for name, value in os.environ.items() if name not in ours}
