"""How much memory this process may still take: the machine's, or its container's if that is less.

Reads /proc and the cgroup files (v1 and v2) under an injectable root. Knows nothing of pools.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quire.errors import MemoryBudgetError

GIB = 1 << 30

_HEADROOM_FRACTION = 20
_HEADROOM_MAX_BYTES = 2 * GIB

# cgroup v1 spells "no limit" as the largest multiple of the page size below 2^63.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """What is left under the tightest limit."""

    available_bytes: int
    limit_bytes: int
    origin: str
    """Which limit it is, in words a person can act on."""


@dataclass(frozen=True, slots=True)
class _Controller:
    """The files of one cgroup version."""

    version: str
    mount: str
    limit_file: str
    usage_file: str
    reclaimable: str
    """Line of memory.stat with page cache the kernel gives back when asked."""


_V1 = _Controller(
    "v1",
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
_V2 = _Controller("v2", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """The tightest of /proc/meminfo and every memory cgroup this process is in."""
    limits = [_machine(root), *_cgroups(root)]
    return min(limits, key=lambda limit: limit.available_bytes)


def check_host_budget(
    requested_bytes: int,
    *,
    what: str = "host pool",
    option: str = "host_bytes",
    root: Path = Path("/"),
) -> None:
    """Raises MemoryBudgetError, saying what was asked, what is there, whose limit it is and the
    fix, unless `requested_bytes` fit and leave some headroom for the rest of the process."""
    memory = available_memory(root)
    headroom = min(memory.limit_bytes // _HEADROOM_FRACTION, _HEADROOM_MAX_BYTES)
    usable = max(0, memory.available_bytes - headroom)
    if requested_bytes <= usable:
        return
    raise MemoryBudgetError(
        f"{what} asks for {_gib(requested_bytes)} but {_gib(usable)} can be used "
        f"({_gib(memory.available_bytes)} available under {memory.origin}, {_gib(headroom)} kept "
        f"for the rest of the process): set {option} to at most {_gib(usable)} or raise the limit"
    )


def _machine(root: Path) -> AvailableMemory:
    kib = _numbers(root / "proc/meminfo")
    return AvailableMemory(
        kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024, "the machine's memory (/proc/meminfo)"
    )


def _numbers(file: Path) -> dict[str, int]:
    """Of a file's lines, those that are a name and a number."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return {
        line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()
    }


def _cgroups(root: Path) -> Iterator[AvailableMemory]:
    """Limits of this process's memory cgroups and of all their ancestors."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _ancestors(root, _V2, path)
        elif "memory" in controllers.split(","):
            yield from _ancestors(root, _V1, path)


def _ancestors(root: Path, controller: _Controller, path: str) -> Iterator[AvailableMemory]:
    # Inside a container the path may be the host's and not exist here; the mount's own root,
    # always the last of the ancestors, is then the container's group.
    group = PurePosixPath(path.lstrip("/"))
    for relative in (group, *group.parents):
        limit = _group_limit(root / controller.mount / relative, controller, f"/{relative}")
        if limit is not None:
            yield limit


def _group_limit(folder: Path, controller: _Controller, name: str) -> AvailableMemory | None:
    """None when the group has no limit, or is not there."""
    try:
        limit = int((folder / controller.limit_file).read_text())
        used = int((folder / controller.usage_file).read_text())
    except (OSError, ValueError):  # "max" is how v2 says "no limit"
        return None
    if limit >= _NO_LIMIT_BYTES:
        return None
    reclaimable = 0
    with contextlib.suppress(OSError):
        reclaimable = _numbers(folder / "memory.stat").get(controller.reclaimable, 0)
    available = max(0, limit - used + reclaimable)
    origin = f"cgroup {controller.version} {controller.limit_file} of {name.replace('/.', '/')}"
    return AvailableMemory(min(available, limit), limit, origin)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
