"""ServerConfig: how the server listens, whom it lets in, and how long it waits.

Knows nothing of models or of the cache: that is EngineConfig.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import ConfigError
from quire.server.tools import AUTO, NONE, formats

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    api_key: str | None = None
    """For /v1, as `Authorization: Bearer`; None: anybody who can connect."""
    tenant_keys: Mapping[str, str] = field(default_factory=dict)
    """Of tenants, by their names. Who has one of these needs not the other."""
    admin_key: str | None = None
    """For /admin; None: nobody can use it."""
    request_timeout_s: float = 600.0
    """The longest that one request may take; a request may ask for less."""
    engine_silence_s: float = 120.0
    """After which the engine counts as hung."""
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
    waiting_s: float = 10.0
    """A stream without a first token says so often that it is there."""
    tenant_requests: int = 0
    """In flight, of those who share a `cache_salt`; 0: any number."""
    strict: bool = False
    """Fields of /v1 that nobody knows are wrong; else they are ignored."""
    served_names: tuple[str, ...] = ()
    """What requests may call the model; empty: by the engine's name for it."""
    tool_parser: str = AUTO
    """How calls are read: a format's name, "auto" or "none"."""
    reasoning_parser: str = AUTO
    """"think", "auto" or "none"."""
    use_model_defaults: bool = True
    """What a request does not say of sampling is as the model's makers say."""
    keep_alive_s: int = 30
    """An idle connection is closed after this."""
    log_requests: bool = False
    """A line in the log for every answer."""
    otlp: str | None = None
    """A collector of OpenTelemetry that gets a span for every request; None: nobody does."""
    record: Path | None = None
    """A new file, to which a trace of the requests is written; None: they are not recorded."""
    record_max_bytes: int = 256 * _MIB
    routers: tuple[str, ...] = ()
    """To which the server says that it is there, as `http://host:port`."""
    drain_timeout_s: float = 600.0
    """For requests to finish when the server is told to stop by SIGTERM."""
    shutdown_grace_s: float = 5.0
    """For requests to finish when it is to stop soon, or that time is over; the rest are told that
    it stops."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: it must be from 0 (any free one) to 65535")
        for option in (
            "request_timeout_s",
            "engine_silence_s",
            "max_body_bytes",
            "max_head_bytes",
            "max_connections",
            "head_timeout_s",
            "body_timeout_s",
            "write_timeout_s",
            "waiting_s",
            "keep_alive_s",
            "record_max_bytes",
        ):
            if not getattr(self, option) > 0:
                raise ConfigError(f"{option} is {getattr(self, option)}: it must be more than 0")
        if self.otlp is not None:
            from quire.tracing.collector import endpoint

            endpoint(self.otlp)
        for router in self.routers:
            if not router.startswith(("http://", "https://")) or router.count("/") != 2:
                raise ConfigError(
                    f"router {router!r} is not the address of one: write it as http://host:port"
                )
        for option in ("shutdown_grace_s", "drain_timeout_s", "tenant_requests"):
            if getattr(self, option) < 0:
                raise ConfigError(f"{option} is {getattr(self, option)}: it must not be negative")
        if self.tool_parser not in (AUTO, NONE) and self.tool_parser not in formats():
            known = ", ".join(sorted(formats()))
            raise ConfigError(
                f"tool_parser {self.tool_parser!r} is not known: choose auto, none or {known}"
            )
        self._check_keys()

    def _check_keys(self) -> None:
        if {self.admin_key, self.api_key} & {*self.tenant_keys.values()}:
            raise ConfigError("a key of tenant_keys is also api_key or admin_key: give another")
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
