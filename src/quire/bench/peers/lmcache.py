"""LMCache's own server as a process, for vLLM's side of it. Knows its command line.

Runs for as long as the benchmark does: vLLM may be started again and finds what it has.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from quire.errors import ConfigError

CHUNK_TOKENS = 256
"""Its default."""
START_S = 180.0


class LmcacheServer:
    def __init__(self, python: Path, memory_gib: int, log: Path) -> None:
        self._port, self._http, metrics = (_free_port() for _ in range(3))
        words = [python.parent / "lmcache", "server", "--host", "localhost"]
        words += ["--port", self._port, "--http-port", self._http, "--prometheus-port", metrics]
        words += ["--chunk-size", CHUNK_TOKENS, "--supported-transfer-mode", "auto"]
        words += ["--l1-size-gb", memory_gib, "--l1-init-size-gb", memory_gib]
        words += ["--eviction-policy", "LRU"]
        self._log = log
        try:
            with log.open("wb") as out:
                self._process = subprocess.Popen(
                    [str(word) for word in words],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"},
                )
        except OSError as error:
            raise ConfigError(f"{words[0]} cannot be run: {error.strerror}") from error

    def ready(self) -> None:
        """Wait until it answers. Raises ConfigError."""
        until = time.monotonic() + START_S
        while True:
            try:
                urlopen(f"http://localhost:{self._http}/healthcheck", timeout=5).close()
                return
            except OSError as error:
                if getattr(error, "code", 0):
                    return  # it speaks, if not of its health
            if self._process.poll() is not None or time.monotonic() > until:
                said = self._log.read_text(errors="replace")[-1000:]
                raise ConfigError(f"LMCache's server does not start: {said}")
            time.sleep(0.2)

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def transfer(self) -> dict[str, Any]:
        """vLLM's side."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": self._port,
            },
        }

    @property
    def max_rss_bytes(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
        return int(peak) << 10

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port
