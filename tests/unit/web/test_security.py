import pytest

from quire.web.addresses import is_loopback
from quire.web.errors import ApiError
from quire.web.security import check_admin, check_key


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


def test_only_the_key_makes_an_admin_c49():
    check_admin({"authorization": "Bearer k", "x-forwarded-for": "1.2.3.4"}, "k")
    for headers, key, status in (({}, "k", 401), ({}, None, 403), ({"host": "::1"}, None, 403)):
        with pytest.raises(ApiError) as caught:
            check_admin(headers, key)
        assert caught.value.status == status
