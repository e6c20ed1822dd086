"""A router's start."""

import asyncio
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.router.config import RouterConfig
from quire.router.run import route
from quire.web.config import WebConfig


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_authorities_that_cannot_be_read_are_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    """A variable of the environment that was set for something else, perhaps."""
    file = tmp_path / "authorities.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    config = RouterConfig(servers=("http://127.0.0.1:9",))
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE is .*authorities.*leave it unset"):
        asyncio.run(route(config, WebConfig(port=0), lambda *_: None))
