import pytest

from quire.errors import ConfigError
from quire.server.config import ServerConfig


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"max_body_bytes": 0},
        {"head_timeout_s": 0},
        {"request_timeout_s": float("nan")},
        {"shutdown_grace_s": -1},
        {"api_key": ""},
        {"api_key": "k\u00e9y"},
        {"admin_key": "a\nb"},
        {"admin_key": " a"},
        {"tool_parser": "x"},
        {"waiting_s": 0},
    ],
)
def test_a_wrong_option_is_named(options):
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**options)


WRONG = "h:1 http:// http://u@h http://@h http://h:99999 http://h:0 http://h/x http://h? http://h#"


@pytest.mark.parametrize("router", ["http://a b", *WRONG.split()])
def test_what_is_no_router_is_said(router):
    with pytest.raises(ConfigError, match="write it as http://host:port"):
        ServerConfig(routers=(router,))


def test_routers_have_names_or_numbers():
    routers = ("http://router:8000", "https://10.0.0.5", "http://[::1]:8000")
    assert ServerConfig(routers=routers).routers == routers
    assert ServerConfig(routers=("HTTP://Router:8000/",)).routers == ("http://router:8000",)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)],
)
def test_what_only_this_machine_reaches(host, is_local):
    assert ServerConfig(host=host).is_local is is_local
