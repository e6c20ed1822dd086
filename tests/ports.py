"""Ports for servers that must be told theirs, and listen on it only when they have started.

Knows which ports the system gives to connections: in the seconds until a server listens, one of
those may be given away. So it is another one, though nobody can be kept from taking it."""

import random
import socket
from pathlib import Path

_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 10_000, 32_000


def free_port() -> int:
    """Nobody listens on it now."""
    end = _HIGHEST
    if _GIVEN_AWAY.exists():
        end = min(end, int(_GIVEN_AWAY.read_text().split()[0]))
    chance = random.SystemRandom()
    while True:
        with socket.socket() as one:
            port = chance.randrange(_LOWEST, end) if end > _LOWEST else 0
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(one.getsockname()[1])
