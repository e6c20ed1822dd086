"""A real `quire serve`, in a process group and a temporary directory of its own.

Knows processes and what they leave behind; of HTTP only the address.

    server  python -m quire.cli serve
      └─ engine  python -m quire.engine.process
           └─ ranks, when there are several  python -m quire.engine.executor.rank_process
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from quire.web.keyfile import read_key

MODEL = "SmolLM2-135M-Instruct"
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 300.0
SHARED_MEMORY = Path("/dev/shm")
_SYSV_SEGMENTS = Path("/proc/sysvipc/shm")
_READY = re.compile(r"is ready at (http://\S+)")
_KEY_FILE = re.compile(r"^Admin key +(.+)$", re.MULTILINE)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 300.0) -> None:
    """The bound is there so that a broken test ends."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def is_moving(status: dict[str, Any]) -> bool:
    """By what the admin API says of the cache: are pages on their way, or to go there?"""
    return bool(any(status["operations"].values()) or status["waiting_writes"])


class Server:
    """Starts at once; `with` waits until it is ready, and at the end leaves no process behind."""

    def __init__(self, folder: Path, **options: object) -> None:
        """`folder` is for its log; options are those of quire.settings."""
        folder.mkdir(parents=True, exist_ok=True)
        # Not in the folder: sockets lie in it, and their paths must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="q-"))
        self._shared_memory = _shared_memory()
        self._log = folder / "log"
        given = {"port": 0, "threads": 1, "store": "none"} | options
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire.cli", "serve"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(self.temporary, given),
                start_new_session=True,  # a group of its own, as in a terminal
            )
        self.url = ""
        self.family: list[psutil.Process] = []
        """Server, engine and ranks, once it is ready."""

    def __enter__(self) -> Self:
        try:
            wait_until(lambda: self._is_ready() or self.ended, "it is ready", START_TIMEOUT_S)
            assert self.url, f"the server ended before it was ready:\n{self.log}"
            process = psutil.Process(self.process.pid)
            self.family = [process, *process.children(recursive=True)]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    @property
    def log(self) -> str:
        """All that it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def admin_headers(self) -> dict[str, str]:
        """With the key that it made for itself, from the file that it says."""
        found = _KEY_FILE.search(self.log)
        assert found, self.log
        key = read_key(Path(found[1]))
        return {"authorization": f"Bearer {key}"}

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def engine(self) -> psutil.Process:
        return next(p for p in self.family[1:] if "quire.engine.process" in p.cmdline())

    @property
    def ranks(self) -> list[psutil.Process]:
        return [p for p in self.family[1:] if "rank_process" in " ".join(p.cmdline())]

    def press_ctrl_c(self) -> None:
        """As a terminal does: to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill_all(self) -> None:
        """As the end of a container does."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, negative for a signal."""
        return self.process.wait(END_TIMEOUT_S)

    def wait_gone(self) -> None:
        """Until no process of it is left."""
        self.wait()
        wait_until(lambda: not self.survivors(), f"{self.family} have ended", END_TIMEOUT_S)

    def survivors(self) -> list[psutil.Process]:
        living = {p for p in self.family if _lives(p)}
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if os.getpgid(process.pid) == self.process.pid and _lives(process):
                    living.add(process)
        return sorted(living, key=lambda process: process.pid)

    def leftovers(self) -> list[str]:
        """What it put into its temporary directory and into shared memory, and is still there."""
        paths = [
            p for p in self.temporary.rglob("*") if "quire" in str(p.relative_to(self.temporary))
        ]
        found = [str(path) for path in paths]
        found += [str(p) for p in self.temporary.rglob("*") if p.is_socket() and p not in paths]
        # Others on this machine may use shared memory too, for a moment.
        deadline = time.monotonic() + 60.0
        while (new := _shared_memory() - self._shared_memory) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found + sorted(new)

    def _is_ready(self) -> bool:
        found = _READY.search(self.log)
        if found:
            self.url = found[1]
        return found is not None


def _environment(temporary: Path, options: dict[str, object]) -> dict[str, str]:
    """The caller's, less its own options of Quire."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("QUIRE_") or name == "QUIRE_CACHE_DIR"
    }
    ours = {f"QUIRE_{name.upper()}": str(value) for name, value in options.items()}
    return inherited | ours | {"TMPDIR": str(temporary)}


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _shared_memory() -> set[str]:
    """Named segments, of POSIX and System V."""
    posix = {str(path) for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
    if not _SYSV_SEGMENTS.exists():
        return posix
    lines = _SYSV_SEGMENTS.read_text().splitlines()[1:]
    return posix | {f"System V segment {line.split()[1]}" for line in lines}
