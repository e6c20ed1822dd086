"""Which adapter a request runs with: a text that changes with its weights. Knows files, no vLLM.

A name and a path say nothing of it: who trains an adapter again writes it where it was, and a store
still has what was computed with the old one. So every byte of its files is read, when vLLM first
runs it. vLLM reads them at about that time, and does not say when again: an adapter whose files
change while vLLM lives may be the old one or the new one in its memory, so it is not cached any
more.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

_SUFFIXES = (".json", ".safetensors", ".bin", ".pt")
_CHUNK_BYTES = 1 << 20

_logger = logging.getLogger(__name__)

FileDates = list[tuple[str, int, int, int]]
"""By name: size, date and number of each file."""


class Adapter(Protocol):
    lora_name: str
    lora_path: str


Identify = Callable[[Adapter], str | None]
"""None: it cannot be told from others, and nothing of it is cached."""


@dataclass(frozen=True, slots=True)
class _Seen:
    dates: FileDates
    digest: str | None
    """None: its files have changed."""


@dataclass(slots=True)
class AdapterFiles:
    """Adapters in directories of this machine."""

    _seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)

    def identify(self, adapter: Adapter) -> str | None:
        name = (adapter.lora_name, adapter.lora_path)
        seen = self._seen.get(name)
        if seen is not None and seen.digest is None:
            return None
        try:
            files = _files(Path(adapter.lora_path).expanduser())
            dates = _dates(files)
            if seen is not None and seen.dates == dates:
                return seen.digest
            digest = _digest(files) if seen is None and files else None
        except OSError:
            dates, digest = [], None
        if digest is None:
            _logger.warning(
                "requests with the adapter %s are not cached until vLLM starts again: %s",
                adapter.lora_name,
                f"the files of {adapter.lora_path} have changed"
                if seen is not None
                else f"{adapter.lora_path} is not a directory with its files",
            )
        self._seen[name] = _Seen(dates, digest)
        return digest


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)


def _dates(files: list[Path]) -> FileDates:
    found = [(path.name, path.stat()) for path in files]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found]


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = hashlib.sha256()
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                content.update(chunk)
        name = path.name.encode()
        digest.update(len(name).to_bytes(8, "little") + name + content.digest())
    return digest.hexdigest()
