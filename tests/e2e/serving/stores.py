"""Looking at a file store from outside: the files themselves, and `quire store`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def url_of(store: Path, size: str = "1GiB") -> str:
    return f"file://{store}?max={size}"


def keys_in(store: Path) -> set[str]:
    """The keys of all pages, which are the names of their files."""
    return {path.name.partition(".")[0] for path in pages_in(store)}


def pages_in(store: Path) -> list[Path]:
    return [path for path in store.glob("objects/??/*") if not path.name.startswith(".")]


def listed(store: Path) -> set[str]:
    """The keys of all pages, as `quire store ls` shows them."""
    return {item["key"] for item in _quire("ls", store)["objects"]}


def verify(store: Path) -> dict[str, Any]:
    """Reads every page against its checksum. Opening it also removes what dead writers left."""
    return _quire("verify", store)


def unfinished(store: Path) -> list[Path]:
    """Files that were being written."""
    return [path for path in store.rglob("*") if path.name.endswith((".tmp", ".part"))]


def strangers(store: Path) -> list[str]:
    """Files that are neither pages nor the store's own books."""
    books = {"quire-store.json", "used_bytes", "coldest", "scan"}
    return [
        str(path.relative_to(store))
        for path in store.rglob("*")
        if path.is_file()
        and path.name not in books
        and path.parent.parent != store / "objects"
        and not (path.parent == store / "state" and path.suffix == ".lock")
    ] + [str(path) for path in unfinished(store)]


def _quire(command: str, store: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli", "store", command, "--json", url_of(store)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)
