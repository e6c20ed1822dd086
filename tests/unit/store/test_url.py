from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import EntryPoint

import pytest

from quire.errors import ConfigError, StoreError, StoreURLError
from quire.sizes import format_bytes, parse_size
from quire.store import open_store
from quire.store.file import FileStore
from quire.store.memory import MemoryStore
from quire.store.opening import check_pages, open_pages
from quire.store.redis.store import login_of
from quire.store.url import parse_url, redact


@pytest.mark.parametrize(
    ("text", "expected"),
    [("20GiB", 20 << 30), ("1.5 MiB", 3 << 19), ("4096", 4096), ("2g", 2 << 30), ("1kB", 1000)],
)
def test_sizes_are_parsed(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "20 gigs", "-1GiB", "1e9"])
def test_wrong_size_is_one_sentence_with_an_example(text):
    with pytest.raises(ConfigError, match="such as 20GiB"):
        parse_size(text)


def test_bytes_are_formatted():
    assert [format_bytes(n) for n in (17, 360 << 10, 3 << 19, 5 << 40)] == [
        "17 B",
        "360 KiB",
        "1.5 MiB",
        "5.0 TiB",
    ]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/var/cache", "not a store URL: write scheme://"),
        ("flie:///tmp/x", "known schemes are .*file.*memory"),
        ("file://tmp/x", "three slashes"),
        ("file:///tmp/x?maxx=1GiB", "unknown option 'maxx'.*valid options are max, reserve"),
        ("file:///tmp/x?max=lots", "option 'max'.*such as 20GiB"),
        ("file:///tmp/x?max=0", "'max'.*above 0"),
        ("file:///tmp/x?max", r"\?name=value"),
        ("file:///tmp/x?max=1GiB&max=2GiB", "each option once"),
        ("file:///tmp/x#y", "%23"),
        ("file:///tmp/a%00b", "holds a NUL"),
        ("file:///tmp/x?max=9" + "9" * 5000, "'max'.*such as 20GiB"),
        ("file:///tmp/x?max=99999999999TiB", "'max'.*such as 20GiB"),
        ("redis://host:" + "9" * 5000, "names no server"),
        ("redis://host/" + "9" * 5000, "a number"),
        ("mooncake://host:" + "9" * 5000, "names no master"),
        ("faulty+memory://?seed=" + "9" * 5000, "'seed'.*whole number"),
        ("memory://?max=0", "'max'.*above 0"),
        ("memory://name/path", "memory://name"),
        ("faulty:///tmp/x", r"faulty\+SCHEME"),
        ("faulty+memory://?drop=2", "'drop'.*from 0 to 1"),
        ("faulty+memory://?seed=x", "'seed'.*whole number"),
        ("faulty+memory://?dorp=0.1", "unknown option 'dorp'"),
    ],
)
def test_wrong_url_is_one_sentence_with_the_fix(url, message):
    with pytest.raises(StoreURLError, match=message) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_bucket_without_its_package_names_an_extra_that_there_is(scheme, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    for name in ("bucket", "bucket_errors"):
        monkeypatch.delitem(sys.modules, f"quire.store.{name}", raising=False)
    with pytest.raises(StoreError, match=r"pip install 'quire\[s3\]'$") as caught:
        open_store(f"{scheme}://bucket")
    assert "\n" not in str(caught.value)


class OfAnother(EntryPoint):
    """Of a package with other extras, or of none."""

    dist = None


def test_the_package_of_another_is_not_said_to_have_our_extras(monkeypatch):
    theirs = OfAnother("mine", "no_such_package:open_url", "quire.stores")
    monkeypatch.setattr("quire.store.url.entry_points", lambda group: [theirs])
    with pytest.raises(StoreError, match=r"install what it needs$"):
        open_store("mine://somewhere")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mooncake://127.0.0.1?bogus=1", "unknown option 'bogus'"),
        ("mooncake://127.0.0.1?protocol=pigeon&write=back", "'protocol'"),
        ("memory:// mooncake://127.0.0.1/path", "names no master"),
        ("file://tmp/x", "three slashes"),
        ("memory://?codec=rar", "'codec'"),
    ],
)
def test_urls_are_looked_at_before_anything_is_started(url, message):
    with pytest.raises(StoreURLError, match=message):
        check_pages(url)


def test_a_pool_is_not_joined_to_look_at_its_url():
    check_pages("mooncake://127.0.0.1:1?replicas=2&write=back&codec=zstd memory://")


def test_wrapper_takes_its_options_and_passes_on_the_rest():
    store = open_store("faulty+memory://?seed=7&corrupt=0.5&max=1MiB")
    assert store.stats().capacity_bytes == 1 << 20


def test_file_url_opens_a_file_store(tmp_path):
    store = open_store(f"file://{tmp_path}/my%20store?max=1GiB")
    assert isinstance(store, FileStore)
    assert (tmp_path / "my store").is_dir()
    assert store.stats().capacity_bytes == 1 << 30
    store.close()


def test_nothing_is_created_when_the_store_must_exist(tmp_path):
    with pytest.raises(StoreError, match="there is no store at"):
        open_store(f"file://{tmp_path}/store", must_exist=True)
    assert list(tmp_path.iterdir()) == []


def test_percent_and_host_are_kept_apart():
    url = parse_url("memory://shared?max=1GiB")
    assert (url.host, url.path, url.options) == ("shared", "", {"max": "1GiB"})


def test_named_memory_is_shared_and_private_memory_is_not():
    one = open_store("memory://test-named-sharing?max=1MiB")
    assert open_store("memory://test-named-sharing") is one
    assert isinstance(one, MemoryStore)
    assert open_store("memory://") is not open_store("memory://")


def test_named_memory_of_contradicting_sizes_is_refused():
    open_store("memory://test-named-conflict?max=1MiB")
    with pytest.raises(StoreURLError, match="give the same"):
        open_store("memory://test-named-conflict?max=2MiB")


@pytest.mark.parametrize(
    ("urls", "unused"),
    [
        ("file://{}/store", {"tiers", "backlog", "helpers", "whereabouts"}),
        ("memory:// file://{}/store?write=back", set()),
    ],
)
def test_nothing_of_a_store_is_imported_that_is_not_used(tmp_path, urls, unused):
    """Nor of what packs pages, nor of several in front of each other where there is one, nor what
    other processes are spoken to with."""
    code = """
import sys, time
import quire, quire.worker.config, quire.cli.store
from quire.store import open_pages
open_pages(sys.argv[1], clock=time.monotonic).close()
strangers = {"redis", "obstore", "mooncake", "zstandard", "lz4", "zmq"}
ours = {f"quire.store.{name}" for name in sys.argv[2:]}
sys.exit(" ".join(sorted((strangers | ours) & set(sys.modules))) or 0)
"""
    modules = {"redis", "bucket", "lately", "mooncake"} | unused
    words = [sys.executable, "-c", code, urls.format(tmp_path), *modules]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:pass@host/0", "redis://***@host/0"),
        ("redis://:pa/ss@host/0", "redis://***@host/0"),
        ("s3://bucket/a?secret_key=x&region=y", "s3://bucket/a?secret_key=***&region=y"),
        ("s3://bucket?region=y&Access_Token=x", "s3://bucket?region=y&Access_Token=***"),
        ("redis://:p@ss@host/0", "redis://***@host/0"),
        ("redis://host?password=x", "redis://host?password=***"),
        ("redis://host?pw=x&power=y", "redis://host?pw=***&power=y"),
        ("az://box/a?sv=1&sig=x%2Fy&se=2", "az://box/a?sv=1&sig=***&se=2"),
        ("foo://host?auth=x&design=y", "foo://host?auth=***&design=y"),
        (
            "s3://b?endpoint=http%3A%2F%2Fuser%3Apass%40host%3A1&region=y",
            "s3://b?endpoint=http%3A%2F%2F***%40host%3A1&region=y",
        ),
        ("s3://b?endpoint=http%3A%2F%2Fhost%3A1", "s3://b?endpoint=http%3A%2F%2Fhost%3A1"),
        ("unknown 'redis://u:p@h' in it", "unknown 'redis://***@h' in it"),
        ("redis://u:p'a\"ss@host/0", "redis://***@host/0"),
        ("redis://host?password=p'a\"ss&prefix=x", "redis://host?password=***&prefix=x"),
        (
            "s3://b?endpoint=http%3A%2F%2Fh%3A1%2F%3Ftoken%3Dx&region=y",
            "s3://b?endpoint=http%3A%2F%2Fh%3A1%2F%3Ftoken%3D***&region=y",
        ),
        ("in 's3://b?token=x': valid", "in 's3://b?token=***': valid"),
        ("redis://u:p@h s3://b?token=x", "redis://***@h s3://b?token=***"),
        ("redis://u:" + "p" * 5000 + "@h in it", "redis://*** in it"),
        ("?" * 100_000, "***"),  # at once: every question mark might begin an option
        ("file:///a/b@c", "file:///a/b@c"),
        ("file:///a?size=3", "file:///a?size=3"),
        ("", ""),
    ],
)
def test_credentials_are_not_shown(text, shown):
    assert redact(text) == shown


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/p?access_key_id=me&secret_access_key=s3cret",
        "s3://me:s3cret@bucket/p",
        "s3://bucket/p?endpoint=http://me:s3cret@host:9000",
        "redis://host?password=s3cret",
        "nowhere://host?token=s3cret",
        "az://container/p?sv=2026&sig=s3cret",
        "file:///a?token=s3cret&token=s3cret",
        "redis://me:what s3cret@host",
        "redis://host?mine=s3cret",
        "redis://me:s3cret@a..b",
        "mooncake://127.0.0.1:1?metrics=me:s3cret@host:9003&nothing=1",
        "memory://me:s3cret@named-by-a-secret?max=2MiB",
    ],
)
def test_a_url_with_a_secret_in_the_wrong_place_is_refused_without_it(url):
    open_store("memory://me:s3cret@named-by-a-secret?max=1MiB")
    with pytest.raises(StoreError) as caught:
        open_pages(url, clock=time.monotonic)
    assert "s3cret" not in str(caught.value)


def test_what_was_made_of_a_url_shows_no_password_in_a_traceback():
    url = parse_url("redis://me:s3cret@host/1")
    assert url.credentials == ("me", "s3cret")
    assert "s3cret" not in repr(url)
    assert "s3cret" not in repr(login_of(url, ""))
