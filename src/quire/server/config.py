"""ServerConfig: how the server listens, what it takes from requests, and how long it waits.

Knows nothing of models or of the cache: that is EngineConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import ConfigError
from quire.text.tools import AUTO, NONE, formats
from quire.web.addresses import server_address
from quire.web.config import WebConfig, must_be_positive, must_not_be_negative

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(WebConfig):
    tenant_keys: Mapping[str, str] = field(default_factory=dict)
    """Of tenants, by their names. Who has one of these needs not the other."""
    request_timeout_s: float = 600.0
    """The longest that one request may take; a request may ask for less."""
    engine_silence_s: float = 120.0
    """After which the engine counts as hung."""
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
    log_requests: bool = False
    """A line in the log for every answer."""
    record: Path | None = None
    """A new file, to which a trace of the requests is written; None: they are not recorded."""
    record_max_bytes: int = 256 * _MIB
    routers: tuple[str, ...] = ()
    """To which the server says that it is there, as `http://host:port`."""

    def __post_init__(self) -> None:
        WebConfig.__post_init__(self)  # super() knows the class before its slots were made
        must_be_positive(
            self, "request_timeout_s", "engine_silence_s", "waiting_s", "record_max_bytes"
        )
        must_not_be_negative(self, "tenant_requests")
        object.__setattr__(self, "routers", tuple(map(_router, self.routers)))
        if self.tool_parser not in (AUTO, NONE) and self.tool_parser not in formats():
            known = ", ".join(sorted(formats()))
            raise ConfigError(
                f"tool_parser {self.tool_parser!r} is not known: choose auto, none or {known}"
            )
        if {self.admin_key, self.api_key} & {*self.tenant_keys.values()}:
            raise ConfigError("a key of tenant_keys is also api_key or admin_key: give another")


def _router(text: str) -> str:
    address = server_address(text)
    if address is None:
        raise ConfigError(
            f"router {text!r} is not the address of one: write it as http://host:port"
        )
    return address
