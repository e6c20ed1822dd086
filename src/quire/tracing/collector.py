"""The address of a collector, as people write it."""

from __future__ import annotations

from urllib.parse import urlsplit

from quire.errors import ConfigError


def endpoint(url: str) -> str:
    """Where traces go: below the address of a collector, or the very address that has a path.
    Raises ConfigError."""
    wrong = ConfigError(
        f"otlp {url[:80]!r} is not the address of a collector: write it as http://host:4318"
    )
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable():
        raise wrong
    if parts.username is not None or parts.fragment or " " in url:
        raise wrong
    return parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else url
