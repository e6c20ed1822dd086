"""Addresses with names: who moves is found again under the same name."""

from __future__ import annotations

import socket
import time
from typing import Any

from quire.peer.tcp import TcpTransport
from unit.peer.rig import WAIT_S

NAME = "prefill.example"


def test_a_name_is_looked_up_at_every_dial() -> None:
    """A pod that is started anew has another address, and the old one is nobody's."""
    old = TcpTransport().listen("tcp://127.0.0.1:0")
    port = int(old.address.rpartition(":")[2])
    where, lookup = "127.0.0.1", socket.getaddrinfo

    def found(host: str, *rest: Any, **options: Any) -> Any:
        return lookup(where if host == NAME else host, *rest, **options)

    transport, name = TcpTransport(found), f"tcp://{NAME}:{port}"
    transport.dial(name, time.monotonic() + WAIT_S).close()
    old.close()
    where = "127.0.0.2"
    new = TcpTransport().listen(f"tcp://127.0.0.2:{port}")
    transport.dial(name, time.monotonic() + WAIT_S).close()
    new.close()
