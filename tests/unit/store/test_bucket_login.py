"""Who we are to S3 when the environment does not say: what the file of its users says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("obstore", reason="needs the packages of the s3 extra")

from quire.errors import StoreError
from quire.store.bucket_login import login_of_file
from quire.store.url import open_store

TWO = """
[default]
aws_access_key_id = FIRST
aws_secret_access_key = s3cret%of(first

[second]
aws_access_key_id=SECOND
aws_secret_access_key=s3cret
aws_session_token=t0ken
"""


class Asking(BaseHTTPRequestHandler):
    """Has nothing, and remembers who asked."""

    def do_GET(self):
        said = self.headers.get("Authorization", ""), self.headers.get("x-amz-security-token")
        self.server.asked.append(said)
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Quietly."""


@contextmanager
def asked_by() -> Iterator[list[tuple[str, str | None]]]:
    """Who asks, when a store is opened."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Asking)
    server.asked = []
    serving = Thread(target=server.serve_forever)
    serving.start()
    url = f"s3://bucket?endpoint=http://127.0.0.1:{server.server_port}&region=us-east-1"
    try:
        open_store(url).close()
        yield server.asked
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of somebody whose environment says nothing."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    written = tmp_path / ".aws" / "credentials"
    written.parent.mkdir()
    written.write_text(TWO)
    return written


def test_the_first_profile_of_the_usual_file_is_used(file):
    with asked_by() as asked:
        assert "Credential=FIRST/" in asked[0][0]
        assert asked[0][1] is None


def test_a_profile_that_is_named_is_used_with_its_token(file, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "second")
    with asked_by() as asked:
        assert "Credential=SECOND/" in asked[0][0]
        assert asked[0][1] == "t0ken"


def test_a_file_elsewhere_is_used(file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(elsewhere))
    with asked_by() as asked:
        assert "Credential=FIRST/" in asked[0][0]


def test_what_the_environment_says_goes_first(file, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with asked_by() as asked:
        assert "Credential=ENVIRONMENT/" in asked[0][0]


@pytest.mark.parametrize("name", ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"])
def test_a_role_or_nobody_that_the_environment_names_goes_first(file, name):
    assert login_of_file({name: "something"}) is None


@pytest.mark.parametrize("text", [None, "", "[default]\nregion = eu-central-1\n"])
def test_without_a_profile_there_it_is_the_machines_role(file, text):
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert login_of_file({}) is None


def test_nor_is_a_home_that_is_none_in_the_way_of_it(monkeypatch):
    monkeypatch.setenv("HOME", "/dev/null")
    assert login_of_file({}) is None


@pytest.mark.parametrize("text", [None, TWO, "[third]\naws_access_key_id = THIRD\n"])
def test_a_profile_that_is_not_there_is_one_sentence_with_its_name(file, text):
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(StoreError, match=r"'third' .* no access key in ~/.aws/credentials") as told:
        login_of_file({"AWS_PROFILE": "third"})
    assert not {"\n", "s3cret", "THIRD"} & set(str(told.value).split(" "))


@pytest.mark.parametrize("content", [b"aws_secret_access_key = s3cret", b"[default]\ns3cret\xff"])
def test_a_file_that_is_none_is_one_sentence_without_what_is_in_it(file, content):
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"~/.aws/credentials cannot be read") as told:
        login_of_file({})
    assert "s3cret" not in str(told.value)
    assert "\n" not in str(told.value)
    assert told.value.__cause__ is None


def test_a_new_login_is_seen_and_half_a_file_is_not(file):
    login = login_of_file({})
    first = login()
    file.write_text("[default]\naws_access_key_id = NEXT\n")
    assert login()["access_key_id"] == "FIRST"
    file.write_text(TWO.replace("FIRST", "NEXT"))
    assert login()["access_key_id"] == "NEXT"
    assert login()["expires_at"] >= first["expires_at"]
