"""Engines of the real vLLM for tests, one after the other, each in a process of its own.

Importing vLLM takes longer than most of these tests, so one process does it and every engine is a
fork of that one. Knows how to ask scenario.py; no vLLM.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "vllm"
PAGE = 32
"""Tokens of a block, and of a page."""
ANSWER = 12
KILL_WITHIN_S = 240.0

Step = dict[str, Any]
Found = list[dict[str, Any]]


def prompt(number: int, length: int) -> list[int]:
    """Words of the model's vocabulary, in no order; half of it is common to all."""
    common, own = random.Random(0), random.Random(number)
    half = length // 2
    return [common.randrange(1000, 40000) for _ in range(half)] + [
        own.randrange(1000, 40000) for _ in range(length - half)
    ]


LONG = prompt(1, 600)
"""Longer than Gemma's windows."""
MANY = [prompt(number, 80 + 10 * number) for number in range(2, 18)]


def whole_pages(tokens: list[int]) -> int:
    """Tokens that a full hit brings: all full pages, but at least one token is computed."""
    return (len(tokens) - 1) // PAGE * PAGE


def ask(*prompts: list[int], **how: Any) -> Step:
    return {"do": "generate", "prompts": list(prompts), "max_tokens": ANSWER, **how}


def send(process: int, number: int) -> Step:
    return {"do": "send", "process": process, "number": number}


FORGET: Step = {"do": "forget_local"}
RESET: Step = {"do": "reset"}
SETTLE: Step = {"do": "settle"}


@dataclass(frozen=True)
class Subject:
    """A model, and what vLLM answers by itself."""

    model: str
    long: list[list[int]]
    many: list[list[int]]
    num_groups: int
    """Of layers, each with blocks of its own."""


def vllm_environment(**more: str) -> dict[str, str]:
    """Of processes in vLLM's own environment. They keep what they compile of it, which otherwise
    takes longer each time than all else before an engine is built."""
    ours = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in ours} | more


class Engines:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [os.environ["QUIRE_VLLM_PYTHON"], str(HERE / "scenario.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=vllm_environment(PYTHONPATH=str(HERE)),
            )

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def vllm(self, model: str, steps: list[Step], **told: Any) -> Found:
        """What one engine found, step by step."""
        result, log = self._begin(model, steps, told)
        code = self._ended()
        assert code == 0, log.read_text()[-6000:]
        found = json.loads(result.read_text())
        assert isinstance(found, list)
        return found

    def quire(self, model: str, steps: list[Step], store: str = "", **told: Any) -> Found:
        return self.vllm(model, steps, **_with_quire(store, told))

    def killed(
        self, model: str, steps: list[Step], store: str, when: Callable[[], bool], **told: Any
    ) -> None:
        """One engine with Quire, ended by SIGKILL when something is so, which must come before its
        last step ends."""
        _, log = self._begin(model, steps, _with_quire(store, told))
        until = time.monotonic() + KILL_WITHIN_S
        while not (is_so := when()) and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(self._engine, signal.SIGKILL)
        code = self._ended()
        assert is_so, f"it never was so\n{log.read_text()[-6000:]}"
        assert code == -signal.SIGKILL, f"it ended first\n{log.read_text()[-6000:]}"

    def _begin(self, model: str, steps: list[Step], told: dict[str, Any]) -> tuple[Path, Path]:
        self._count += 1
        result, log = self._folder / f"{self._count}.json", self._folder / f"{self._count}.log"
        order = {"model": model, "steps": steps, "result": str(result), "log": str(log), **told}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._engine = int(self._line())
        return result, log

    def _ended(self) -> int:
        return int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (self._folder / "log").read_text()[-6000:]
        return line


def _with_quire(store: str, told: dict[str, Any]) -> dict[str, Any]:
    # A busy machine may take long to open a store, and these tests know what they should find.
    extra = {"host_memory": "256MiB", "wait_s": 120, **({"store": store} if store else {})}
    return {"connector": "QuireConnector", "extra": {**extra, **told.pop("extra", {})}, **told}


def is_clean(end: dict[str, Any]) -> bool:
    """Nothing is held: of vLLM's blocks only the one that it keeps for itself."""
    return (end["busy"], end["leases"]) == (False, 0) and end["used_blocks"] <= 1
