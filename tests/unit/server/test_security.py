import pytest

from quire.server.errors import ApiError
from quire.server.security import check_admin, check_key, is_loopback, redact

LOCAL = {"host": "localhost:8000"}


def status(headers, peer="127.0.0.1", key=None):
    try:
        check_admin(headers, peer, key)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    "header", ["Bearer key", "bearer key", "Bearer  key "], ids=["plain", "lower", "spaces"]
)
def test_the_right_key_is_let_in(header):
    check_key({"authorization": header}, "key")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer keys"},
        {"authorization": "Basic key"},
        {"authorization": "key"},
        {"authorization": "Bearer k\xe9y"},
        {"authorization": "Bearer \u20ac"},
    ],
)
def test_any_other_key_is_refused(headers):
    with pytest.raises(ApiError) as caught:
        check_key(headers, "key")
    assert caught.value.status == 401
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("localhost", False),  # a name is not an address of a peer
        ("", False),
        (None, False),
    ],
)
def test_loopback(host, is_local):
    assert is_loopback(host) is is_local


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80"])
def test_without_a_key_a_program_on_this_machine_is_the_admin(host):
    assert status({"host": host.lower()}) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1"},
        {"x-real-ip": "127.0.0.1"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://[bad"},
        {"host": "evil.example"},
        {"host": "localhost.evil.example"},
        {"host": ""},
        {"host": "[bad"},
    ],
)
def test_without_a_key_nobody_else_is(headers):
    assert status(LOCAL | headers) == 403


def test_without_a_key_a_peer_from_outside_is_refused():
    assert status(LOCAL, peer="10.0.0.7") == 403
    assert status(LOCAL, peer=None) == 403


def test_a_page_of_this_server_itself_is_let_in():
    assert status(LOCAL | {"origin": "http://localhost:8000"}) == 200


def test_with_a_key_only_the_key_counts():
    assert status({"authorization": "Bearer k"}, peer="10.0.0.7", key="k") == 200
    assert status(LOCAL, key="k") == 401


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:pass@host/0", "redis://***@host/0"),
        ("redis://:pa/ss@host/0", "redis://***@host/0"),
        ("s3://bucket/a?secret_key=x&region=y", "s3://bucket/a?secret_key=***&region=y"),
        ("s3://bucket?region=y&Access_Token=x", "s3://bucket?region=y&Access_Token=***"),
        ("unknown 'redis://u:p@h' in it", "unknown 'redis://***@h' in it"),
        ("file:///a/b@c", "file:///a/b@c"),
        ("file:///a?size=3", "file:///a?size=3"),
        ("", ""),
    ],
)
def test_credentials_are_not_shown(text, shown):
    assert redact(text) == shown
