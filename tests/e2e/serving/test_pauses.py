"""A process that serves does not look for garbage among what it made at its start.

Real processes: a server with its engine and two ranks, and a router. What Python imports first in
each of them counts what collections leave out.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.serving.server import Server, wait_until

MODULES_ALONE = 20_000
"""Containers: fewer than those of the modules that any of these processes has imported."""

COUNTING = """
import gc, json, os, threading, time

def count():
    while True:
        counted = {"at": time.time(), "left_out": gc.get_freeze_count()}
        path = os.path.join(os.environ["COUNT_GARBAGE_IN"], str(os.getpid()))
        with open(path + ".new", "w") as file:
            json.dump(counted, file)
        os.replace(path + ".new", path)
        time.sleep(0.2)

threading.Thread(target=count, daemon=True).start()
"""


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each process writes what it has counted, by its number."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(COUNTING)
    counts = tmp_path / "counts"
    counts.mkdir()
    before = os.environ.get("PYTHONPATH")
    path = [str(tmp_path / "first"), *([before] if before else ())]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("COUNT_GARBAGE_IN", str(counts))
    return counts


def counted(counts: Path, pid: int) -> dict[str, Any]:
    """By a process that is ready, from now on."""
    now, found = time.time(), {"at": 0.0}

    def is_new() -> bool:
        if (counts / str(pid)).exists():
            found.update(json.loads((counts / str(pid)).read_text()))
        return found["at"] > now

    wait_until(is_new, f"{pid} has counted")
    return found


def test_what_was_made_at_the_start_is_left_out(counts, tmp_path):
    with Server(tmp_path / "server", tp=2) as server:
        serving = [server.process.pid, server.engine.pid, *(rank.pid for rank in server.ranks)]
        assert len(serving) == 4
        command = [sys.executable, "-m", "quire.cli", "route", "--port", "0"]
        with subprocess.Popen(
            [*command, "--server", server.url], stdout=subprocess.PIPE, text=True
        ) as router:
            try:
                assert router.stdout is not None
                assert any("is ready at" in line for line in router.stdout)
                for pid in [*serving, router.pid]:
                    found = counted(counts, pid)
                    assert found["left_out"] > MODULES_ALONE, pid
            finally:
                router.kill()
