"""Where a server listens. How it begins and ends is in e2e/server."""

import contextlib
import socket

import pytest

from quire.errors import ConfigError
from quire.server.config import ServerConfig
from quire.server.run import _warn_if_open
from quire.web.listening import bind, url_of


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1"),
        ("localhost", "http://localhost"),
        ("0.0.0.0", "http://127.0.0.1"),
    ],
)
def test_a_free_port_is_found(host, url):
    config = ServerConfig(host=host, port=0)
    with contextlib.closing(bind(config)) as listener:
        assert listener.family == socket.AF_INET
        assert listener.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's algorithm on
        assert url_of(config, listener) == f"{url}:{listener.getsockname()[1]}"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_ipv6():
    config = ServerConfig(host="::1", port=0)
    with contextlib.closing(bind(config)) as listener:
        assert url_of(config, listener).startswith("http://[::1]:")


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*another port"):
            bind(ServerConfig(port=port))


def test_an_address_that_is_not_here():
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(ServerConfig(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, match="not an address"):
        bind(ServerConfig(host="no such host", port=0))


@pytest.mark.parametrize(
    ("options", "warns"),
    [({}, False), ({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "api_key": "k"}, False)],
)
def test_an_open_door_is_warned_of(caplog, options, warns):
    _warn_if_open(ServerConfig(**options))
    assert ("without an API key" in caplog.text) is warns
