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


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)],
)
def test_what_only_this_machine_reaches(host, is_local):
    assert ServerConfig(host=host).is_local is is_local
