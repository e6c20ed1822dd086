"""Memory near a device: which NUMA node that is, and asking the kernel for pages there.

Reads /sys under an injectable root. Everything here is an optimisation: whatever is missing or
refused leaves memory where it would have been.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_MASK_BITS = 1024


def node_of_device(pci_address: str, root: Path = Path("/")) -> int | None:
    """Of a device by its PCI address, as in 0000:3b:00.0. None: there is only one node, or nobody
    knows."""
    try:
        nodes = (root / "sys/devices/system/node/online").read_text().strip()
        node = int((root / "sys/bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 and nodes != "0" else None


def prefer_node(address: int, size_bytes: int, node: int) -> bool:
    """Pages of this mapping that are touched from now on come from the node, while it has some.
    False: the kernel has refused."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MASK_BITS:
        return False
    words = (ctypes.c_ulong * (_MASK_BITS // 64))()
    words[node // 64] = 1 << node % 64
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    result = syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(_MASK_BITS),
        ctypes.c_uint(0),
    )
    return int(result) == 0
