"""A subscriber to cache events with vLLM's own classes, as a process in vLLM's own environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_engines import vllm_environment

HERE = Path(__file__).parent / "vllm"


class Subscriber:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def held(self) -> dict[str, Any]:
        """What it has heard of by now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def subscribed(events: str, replay: str) -> Iterator[Subscriber]:
    command = [os.environ["QUIRE_VLLM_PYTHON"], str(HERE / "subscriber.py"), events, replay]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=vllm_environment()
    ) as process:
        try:
            assert process.stdout is not None
            while (line := process.stdout.readline().strip()) != "ready":  # vLLM may say more
                assert line or process.poll() is None, "it ended before it was ready"
            yield Subscriber(process)
        finally:
            process.kill()
