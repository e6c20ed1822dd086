"""RouterConfig: the servers there are, and how patient the router is with them.

Where it listens itself is a ServerConfig, like any server's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from quire.errors import ConfigError
from quire.web.addresses import HTTP, server_address

_DNS = "dns"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    prefill: tuple[str, ...] = ()
    """Base URLs of servers with that role; dns://name:port: of all that the name stands for."""
    decode: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    """Of servers that need no prefill server named to them."""
    admin_key: str | None = None
    """For their /admin; None: it is in a file."""
    admin_key_file: Path | None = None
    """None: each of them wrote its own on this machine, where keyfile.py says."""
    retries: int = 3
    """Further servers that are tried for a request when one fails."""
    check_interval_s: float = 2.0
    check_timeout_s: float = 5.0
    max_failures: int = 3
    """Checks without an answer after which a server counts as down; refused at once counts once."""
    min_backoff_s: float = 0.25
    max_backoff_s: float = 10.0
    """Between checks of a server that is down, doubling."""
    events_interval_s: float = 1.0
    keys_timeout_s: float = 2.0
    """For the page keys of a prompt; without them a server is chosen by load."""
    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 660.0
    """Without a byte from a server for so long it is given up; they end requests themselves
    sooner."""
    max_index_pages: int = 2_000_000
    """Pages that the router remembers, of all servers together: about 200 bytes each, taken as they
    come."""
    forget_s: float = 60.0
    """A server that came by itself and is down for so long is forgotten."""
    names_interval_s: float = 5.0
    """Between two times that a name is looked up."""

    def __post_init__(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            missing, other = ("--prefill", "--decode") if self.decode else ("--decode", "--prefill")
            raise ConfigError(
                f"{other} is given without {missing}: give both, or --server for servers that do "
                "everything themselves"
            )
        urls = self.prefill + self.decode + self.servers
        for i, url in enumerate(urls):
            if url in urls[:i]:
                raise ConfigError(f"{url} is given twice: give each server once, for one purpose")
        if self.max_index_pages < 1:
            raise ConfigError(f"--max-index-pages is {self.max_index_pages}: it must be at least 1")
        if self.retries < 0:
            raise ConfigError(f"retries is {self.retries}: it must not be negative")


def is_name(url: str) -> bool:
    """Is it looked up, and looked up again?"""
    return urlsplit(url).scheme == _DNS


def parse_urls(texts: Iterable[str]) -> tuple[str, ...]:
    """Base URLs, given one by one or with commas between. Raises ConfigError."""
    return tuple(_parse_url(each.strip()) for text in texts for each in text.split(","))


def _parse_url(text: str) -> str:
    address = server_address(text, (*HTTP, _DNS))
    if address is None or (urlsplit(address).scheme == _DNS and not urlsplit(address).port):
        raise ConfigError(
            f"{text[:80]!r} is not the address of a server: write it as http://host:port, or as "
            "dns://name:port for all that DNS has under a name"
        )
    return address
