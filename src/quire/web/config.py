"""WebConfig: where a server or a router listens, whom it lets in, and how patient it is.

Knows HTTP and its connections; what is answered is somebody else's configuration.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from quire.errors import ConfigError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    api_key: str | None = None
    """For /v1, as `Authorization: Bearer`; None: anybody who can connect."""
    admin_key: str | None = None
    """For /admin; None: nobody can use it."""
    max_body_bytes: int = 16 * _MIB
    max_head_bytes: int = 32 * 1024
    """Request line and headers."""
    max_connections: int = 1024
    head_timeout_s: float = 10.0
    """For a request's line and headers to arrive."""
    body_timeout_s: float = 30.0
    """For its body to arrive."""
    write_timeout_s: float = 60.0
    """For a client to take what was sent to it."""
    keep_alive_s: int = 30
    """An idle connection is closed after this."""
    otlp: str | None = None
    """A collector of OpenTelemetry that gets a span for every request; None: nobody does."""
    drain_timeout_s: float = 600.0
    """For requests to finish when it is told to stop by SIGTERM."""
    shutdown_grace_s: float = 5.0
    """For requests to finish when it is to stop soon, or that time is over; the rest are told that
    it stops."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: it must be from 0 (any free one) to 65535")
        must_be_positive(
            self,
            "max_body_bytes",
            "max_head_bytes",
            "max_connections",
            "head_timeout_s",
            "body_timeout_s",
            "write_timeout_s",
            "keep_alive_s",
        )
        if self.otlp is not None:
            from quire.tracing.collector import endpoint

            endpoint(self.otlp)
        must_not_be_negative(self, "shutdown_grace_s", "drain_timeout_s")
        for option in ("api_key", "admin_key"):
            key = getattr(self, option)
            if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
                raise ConfigError(
                    f"{option} must be printable ASCII without spaces around it: "
                    "it travels in an HTTP header"
                )
            if key == "":
                raise ConfigError(f"{option} is empty: give it a value or leave it out")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def must_be_positive(config: WebConfig, *options: str) -> None:
    """Raises ConfigError."""
    for option in options:
        if not getattr(config, option) > 0:
            raise ConfigError(f"{option} is {getattr(config, option)}: it must be more than 0")


def must_not_be_negative(config: WebConfig, *options: str) -> None:
    """Raises ConfigError."""
    for option in options:
        if getattr(config, option) < 0:
            raise ConfigError(f"{option} is {getattr(config, option)}: it must not be negative")
