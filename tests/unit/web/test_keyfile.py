"""The file with the key that a server made for itself: whose it is, and how it is found."""

import socket
import subprocess
import sys

import pytest

from quire.errors import ConfigError
from quire.web.keyfile import find_key, kept, make_key, place_of, read_key


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


def test_it_is_found_by_the_address_of_a_server_on_this_machine_only():
    key = make_key()
    with kept(key, place_of("http://127.0.0.1:8000")):
        for url in ("http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"):
            assert find_key(url) == key
        for url in ("http://10.0.0.1:8000", "http://localhost.evil:8000", "http://127.0.0.1:8001"):
            assert find_key(url) is None
    assert find_key("http://127.0.0.1:8000") is None


def test_a_file_that_was_named_is_for_any_address(tmp_path):
    with kept("k", tmp_path / "f"):
        assert find_key("http://10.0.0.1:8000", tmp_path / "f") == "k"


def test_nobody_else_can_read_it_whatever_was_there(tmp_path):
    other, file = tmp_path / "other", tmp_path / "key"
    other.write_text("theirs")
    file.symlink_to(other)
    with kept("mine", file):
        assert not file.is_symlink()
        assert file.stat().st_mode & 0o777 == 0o600
    assert other.read_text() == "theirs"
    file.write_text("old")
    file.chmod(0o644)
    with kept("mine", file):
        assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_a_later_servers_key_stays(tmp_path):
    file = tmp_path / "key"
    with kept("first", file):
        file.write_text("second")
    assert read_key(file) == "second"


@pytest.mark.parametrize("content", [b"", b"\n", b"a\nb", b"\xff", b"k\x00"])
def test_what_is_no_key_is_said(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match="the admin key"):
        read_key(tmp_path / "key")


def test_what_a_killed_server_left_behind_is_removed_by_the_next(tmp_path):
    """Its process is gone, and with it the lock; that of a server that lives stays, and so does
    what is nobody's key."""
    folder = place_of("http://127.0.0.1:1").parent
    code = (
        "import os, sys; from pathlib import Path; from quire.web.keyfile import kept\n"
        "with kept('k', Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder / "1")], check=False)
    assert read_key(folder / "1") == "k"
    (folder / "2.0123abcd").write_text("half of a k")
    (folder / "notes").write_text("mine")
    with kept("alive", folder / "3"):
        with kept("new", folder / "4"):
            assert sorted(file.name for file in folder.iterdir()) == ["3", "4", "notes"]
        assert read_key(folder / "3") == "alive"
    with kept("new", tmp_path / "5"):
        assert (folder / "notes").read_text() == "mine"


def test_the_key_of_a_server_without_a_lock_stays_while_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        file = place_of(f"http://127.0.0.1:{listening.getsockname()[1]}")
        file.parent.mkdir(parents=True)
        file.write_text("theirs")
        with kept("mine", place_of("http://127.0.0.1:1")):
            assert file.exists()
    with kept("mine", place_of("http://127.0.0.1:1")):
        assert not file.exists()
