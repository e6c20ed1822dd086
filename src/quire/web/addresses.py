"""Addresses as people and routers write them: page servers', tcp://host:port with commas, and
servers', http://host:port; and which addresses are this machine's.

Knows how they are written, nothing of who listens there.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from quire.errors import ConfigError
from quire.peer.address import join_address, split_address, split_open_address

HTTP = ("http", "https")

MAX_PEERS = 64

_LONGEST_SHOWN = 60


def parse_peers(text: str) -> tuple[str, ...]:
    """Raises ConfigError with what to write instead."""
    peers = tuple(parse_peer(each.strip()) for each in text.split(","))
    if len(peers) > MAX_PEERS:
        raise ConfigError(f"give at most {MAX_PEERS} addresses")
    for i, peer in enumerate(peers):
        if peer in peers[:i]:
            raise ConfigError(f"{peer} is there twice: give each address once")
    return peers


def parse_peer(text: str) -> str:
    """Raises ConfigError with what to write instead."""
    fix = "write tcp://host:port, such as tcp://10.0.0.5:7000, with commas between several"
    shown = repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…")
    wrong = ConfigError(f"{shown} is not the address of a page server: {fix}")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise wrong
    try:
        scheme, host, port = split_address(text)
    except ConfigError:
        raise wrong from None
    address = join_address(scheme, host, port)
    if scheme != "tcp" or not port or text.lower() != address:
        raise wrong
    return address


def server_address(text: str, schemes: Collection[str] = HTTP) -> str | None:
    """`scheme://host:port`, or without the port, of a server and of nothing below it, as it is
    written to be compared; None: `text` is something else."""
    try:
        scheme, host, port = split_open_address(text.rstrip("/"))
    except ConfigError:
        return None
    is_plain = text.isascii() and text.isprintable() and not any(mark in text for mark in " ?#@")
    is_one = scheme in schemes and port != 0 and is_plain
    return join_address(scheme, host, port) if is_one else None


def is_loopback(host: str | None) -> bool:
    """Whether an address is of this machine; ::ffff:127.0.0.1 is 127.0.0.1."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
