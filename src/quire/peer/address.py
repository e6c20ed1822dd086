"""Addresses, `scheme://host:port`: reading, writing, and filling in an open host."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from quire.errors import ConfigError


def split_address(address: str) -> tuple[str, str, int]:
    """Scheme, host, port. Raises ConfigError, with the form it should have."""
    scheme, host, port = split_open_address(address)
    if port is None:
        raise _not_an_address(address)
    return scheme, host, port


def split_open_address(address: str) -> tuple[str, str, int | None]:
    """The same of an address that may go without a port, as servers' do."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        raise _not_an_address(address) from None
    rest = (parts.path, parts.query, parts.fragment, parts.username)
    if not parts.scheme or not parts.hostname or any(rest):
        raise _not_an_address(address)
    return parts.scheme, parts.hostname, port


def _not_an_address(text: str) -> ConfigError:
    return ConfigError(
        f"{text[:100]!r} is not the address of a peer: write tcp://host:port, "
        "with an IPv6 host in brackets"
    )


def join_address(scheme: str, host: str, port: int | None) -> str:
    where = f"[{host}]" if ":" in host else host
    return f"{scheme}://{where}" + ("" if port is None else f":{port}")


def with_host(address: str, host: str) -> str:
    """The address, with `host` where it says only "any of mine"."""
    scheme, named, port = split_address(address)
    try:
        unspecified = ipaddress.ip_address(named).is_unspecified
    except ValueError:
        unspecified = False
    return join_address(scheme, host, port) if unspecified else address
