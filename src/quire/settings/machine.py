"""What "auto" comes to on this machine: how much memory and disk may be taken, and which device.

`probe()` looks, everything else computes. GPUs are asked about in a process of their own, and only
if the machine has any: torch takes seconds to load, and a CUDA context would stay in our memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from quire.engine.config import Role
from quire.errors import ConfigError
from quire.memory.sizing import available_memory
from quire.models import cache_dir
from quire.settings.options import Settings
from quire.settings.values import NONE
from quire.sizes import format_bytes

MIB, GIB = 1 << 20, 1 << 30

CPU_DEVICE_MAX_BYTES = 1 * GIB
CPU_HOST_MAX_BYTES = 2 * GIB
CUDA_DECODE_COMPUTES = 1024
"""Tokens that an H200 computes in about the time that a hand-over of them takes."""
CUDA_HOST_MAX_BYTES = 32 * GIB
STORE_MAX_BYTES = 10 * GIB
STORE_MIN_BYTES = 64 * MIB
"""Less is not worth a store."""
CUDA_SHARE = 0.8
"""Of the memory that the weights leave free; the rest is for activations."""

_GPU_QUESTION = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.cuda.mem_get_info(i)[0] for i in range(count)]))
"""
_GPU_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Machine:
    available_bytes: int
    """Of memory, under the tightest limit."""
    cache_dir: Path
    """Where Quire keeps what it may lose."""
    free_disk_bytes: int
    """There."""
    memory_limit: str = "this machine's memory"
    """What sets `available_bytes`, for a person."""
    gpus: tuple[int, ...] = ()
    """Free bytes of each GPU that torch can use."""


def probe() -> Machine:
    folder, memory = cache_dir().absolute(), available_memory()
    return Machine(memory.available_bytes, folder, _free_disk(folder), memory.origin, _gpus())


def effective(settings: Settings, machine: Machine) -> Settings:
    """The settings with every "auto" worked out that can be before the model is known: on CUDA
    `device_memory` is left, for `cuda_device_bytes`."""
    device = settings.device or ("cuda" if machine.gpus else "cpu")
    dtype = settings.dtype or ("bfloat16" if device == "cuda" else "float32")
    device_memory = settings.device_memory
    if device_memory is None and device == "cpu":
        device_memory = _whole_mib(min(CPU_DEVICE_MAX_BYTES, machine.available_bytes // 8))
    host_memory = settings.host_memory
    if host_memory is None:
        most = CUDA_HOST_MAX_BYTES if device == "cuda" else CPU_HOST_MAX_BYTES
        host_memory = _whole_mib(min(most, machine.available_bytes // 4))
    store = settings.store
    if store is None:
        store = default_store(machine) if host_memory else NONE
    decode_computes = settings.decode_computes
    if decode_computes is None:
        decode_computes = CUDA_DECODE_COMPUTES if device == "cuda" else 0
    peer_port = settings.peer_port
    if peer_port is None and (settings.role is not Role.UNIFIED or settings.peers):
        peer_port = 0
    return replace(
        settings,
        device=device,
        dtype=dtype,
        device_memory=device_memory,
        host_memory=host_memory,
        store=store,
        peer_port=peer_port,
        decode_computes=decode_computes,
    )


def default_store(machine: Machine) -> str:
    most = min(STORE_MAX_BYTES, machine.free_disk_bytes // 4)
    if most < STORE_MIN_BYTES:
        return NONE
    size = format_bytes(_whole_mib(most)).replace(" ", "")
    return f"{(machine.cache_dir / 'store').as_uri()}?max={size}"


def make_cache_dir(machine: Machine) -> None:
    """For the default store, which is not made in a directory that does not exist. Raises
    ConfigError."""
    try:
        machine.cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache directory {str(machine.cache_dir)!r} cannot be made ({error.strerror}): "
            "set QUIRE_CACHE_DIR to a directory that this user can write to"
        ) from error


def cuda_device_bytes(free_bytes: int, weights_bytes: int, tp: int = 1) -> int:
    """For the pages of the device tier, all ranks together, on GPUs that each have `free_bytes`
    before the weights, shared evenly, are loaded. Not positive: the weights do not fit."""
    return int((free_bytes * tp - weights_bytes) * CUDA_SHARE)


def _whole_mib(size_bytes: int) -> int:
    return max(size_bytes // MIB, 1) * MIB


def _free_disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _gpus() -> tuple[int, ...]:
    if not Path("/dev/nvidiactl").exists():
        return ()
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _GPU_QUESTION],
            capture_output=True,
            timeout=_GPU_TIMEOUT_S,
            check=True,
        )
        return tuple(json.loads(asked.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, ValueError, IndexError):
        return ()  # no GPU that torch can use
