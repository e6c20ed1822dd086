"""LMCache's own server as a process, for vLLM's side of it. Knows its command line.

Runs for as long as the benchmark does: vLLM may be started again and finds what it has. It does not
know whether the benchmark is still there, so a process of ours stands between (`main`), which ends
it when the benchmark is gone, however that went.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from quire.child import when_orphaned
from quire.errors import ConfigError

CHUNK_TOKENS = 256
"""Its default."""
START_S = 180.0
_END_S = 20.0


class LmcacheServer:
    def __init__(self, python: Path, memory_gib: int, log: Path) -> None:
        self._port, self._http, metrics = (_free_port() for _ in range(3))
        words = [python.parent / "lmcache", "server", "--host", "localhost"]
        words += ["--port", self._port, "--http-port", self._http, "--prometheus-port", metrics]
        words += ["--chunk-size", CHUNK_TOKENS, "--supported-transfer-mode", "auto"]
        words += ["--l1-size-gb", memory_gib, "--l1-init-size-gb", memory_gib]
        words += ["--eviction-policy", "LRU"]
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"},
            )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            self.close()
            raise ConfigError(f"{words[0]} cannot be run: {log.read_text(errors='replace')[-200:]}")
        self.process_id = int(said)

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
        lines = Path(f"/proc/{self.process_id}/status").read_text().splitlines()
        (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
        return int(peak) << 10

    def close(self) -> None:
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        self._process.wait()


def main(command: list[str]) -> int:
    """Runs it and says its process id; ends it when standard input does."""
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr
        )
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        return 2

    def leave() -> bool:
        server.terminate()
        try:
            server.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.kill()
        return True

    when_orphaned(sys.stdin.fileno(), leave, _END_S)
    print(server.pid, flush=True)
    return server.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
