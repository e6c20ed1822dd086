"""Measuring a store: beside its own client, in a place of its own, and what the doctor says."""

from __future__ import annotations

import importlib.util
import mmap
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import stores
from quire.bench import anystore, doctor
from quire.bench.raw import RawDisk, RawRedis
from quire.cli.store_measure import machine_of
from quire.errors import StoreError
from quire.replay.profile import Profile
from quire.store import open_store
from quire.store.base import HEADER_BYTES, Blob, NewObject, ObjectName
from quire.store.url import parse_url
from quire.testing.stores import name, soon
from store_servers import Mooncake, Moto, Valkey, clustered
from unit.cli_support import command

SMALL = {"page_bytes": 8192, "total_bytes": 128 << 10}


@pytest.fixture
def quire(capsys, monkeypatch):
    return command(capsys, monkeypatch)


def profile(**changes) -> Profile:
    given = {
        "model": "a model",
        "device": "a device",
        "dtype": "bfloat16",
        "bytes_per_token": 100_000,
        "fixed_s": 0.01,
        "s_per_token": 1e-4,
        "s_per_pair": 0.0,
        "host_bytes_per_s": 1e12,
        "store_bytes_per_s": 1e9,
        "longest_tokens": 4096,
    }
    return Profile(**given | changes)


# ---- the bench -----------------------------------------------------------------------------------


def put_one(url: str) -> None:
    """Of somebody else."""
    store = open_store(url)
    blob = Blob(memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(HEADER_BYTES)))
    assert store.put([NewObject(name(1), blob, None, 1)], deadline=soon()) == [0]
    store.close()


def documented_rights() -> list[bytes]:
    said = (Path(__file__).parents[3] / "docs/stores.md").read_text()
    (line,) = re.findall("^ACL SETUSER .*$", said, re.MULTILINE)
    return line.encode().split()


def names_in(url: str) -> list[ObjectName]:
    store = open_store(url)
    found = [item.name for item in store.scan()]
    store.close()
    return found


def check_run(url: str, client: str = "", **how: Any) -> None:
    put_one(url)
    result = anystore.run(url, rounds=2, **SMALL, **how)
    assert client in result["client"]
    for way in ("write", "read"):
        assert result[way]["store_gb_s"] > 0
        assert result[way]["ratio"] > 0
    assert result["probe"]["keys"] == 256
    assert names_in(url) == [name(1)]


def test_redis_is_measured_beside_its_client_and_left_as_it_was(tmp_path):
    server = Valkey(tmp_path)
    try:
        check_run(server.url, "redis-py")
        check_run(server.url, "our own connection", beside=stores.own_connections)
        assert server.say(b"DBSIZE") == 1
    finally:
        server.stop()


def test_a_cluster_is_measured_beside_its_client(tmp_path):
    """Which wants to know all commands of the server first."""
    with clustered(tmp_path) as nodes:
        url = f"redis://quire:password@{nodes[0].address}"
        for node in nodes:
            assert node.say(*documented_rights()) == b"OK"
        with pytest.raises(StoreError, match=r"needs the right \+command"):
            check_run(url)
        for node in nodes:
            assert node.say(*documented_rights(), b"+command") == b"OK"
        check_run(url, "of each server")


def test_redis_is_measured_with_the_rights_that_a_store_needs(tmp_path):
    server = Valkey(tmp_path)
    try:
        assert server.say(*documented_rights()) == b"OK"
        check_run(f"redis://quire:password@{server.address}", "redis-py")
    finally:
        server.stop()


def test_what_the_client_beside_it_fails_at_is_one_sentence(tmp_path):
    memory = memoryview(bytearray(2 << 20))
    server = Valkey(tmp_path, maxmemory="1mb")
    try:
        with closing(RawRedis(parse_url(server.url))) as client:
            for move in (client.put, client.get):
                with pytest.raises(StoreError, match="the raw client did not move every page"):
                    move([name(1)], [memory])
    finally:
        server.stop()


def test_files_are_measured_beside_the_disk_and_left_as_they_were(tmp_path):
    check_run(tmp_path.as_uri(), "direct I/O")
    assert not list(tmp_path.glob("quire-bench-*"))


def test_the_root_of_a_disk_is_a_place_too():
    assert anystore.own_place("file:///").path.startswith("/quire-bench-")


def test_a_disk_with_too_little_room_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(anystore, "SPARE_BYTES", 1 << 60)
    with pytest.raises(StoreError, match="give another path or a smaller --total"):
        anystore.run(tmp_path.as_uri(), rounds=2, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_the_disk_beside_the_store_keeps_every_page(tmp_path):
    memory = memoryview(mmap.mmap(-1, 8 * 4096))  # direct I/O wants whole blocks
    pages = [memory[at : at + 4096] for at in range(0, 8 * 4096, 4096)]
    for number, page in enumerate(pages[:4]):
        page[:] = bytes([number]) * 4096
    names = [name(number) for number in range(4)]
    with closing(RawDisk(tmp_path, 4 * 4096)) as disk:
        disk.put(names[2:], pages[2:4])
        disk.put(names[:2], pages[:2])
        disk.get(names, pages[4:])
    assert pages[4:] == pages[:4]


def test_without_its_library_redis_is_measured_alone_and_that_is_said(quire, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "redis" else find(n))
    server = Valkey(tmp_path)
    try:
        sizes = ("--total", "64KiB", "--page", "8KiB", "--rounds", "1")
        assert "pip install 'quire[bench]'" in quire("store", "bench", server.url, *sizes).out
    finally:
        server.stop()


@pytest.mark.long
def test_a_bucket_is_measured_beside_its_client_and_left_as_it_was(tmp_path, monkeypatch):
    for package in ("moto", "flask_cors", "obstore"):
        pytest.importorskip(package, reason="needs the packages of the dev extra")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    server = Moto(tmp_path)
    try:
        check_run(server.url)
    finally:
        server.stop()


@pytest.mark.long
def test_a_pool_is_measured_beside_its_client_and_left_as_it_was(tmp_path):
    server = Mooncake(tmp_path)
    try:
        check_run(server.url)
        check_run(server.url, "as few calls", beside=stores.in_turns)
    finally:
        server.stop()


def test_a_store_without_a_client_of_its_own_is_measured_alone():
    result = anystore.run("memory://", rounds=1, **SMALL)
    assert "ratio" not in result["read"]


@pytest.mark.parametrize(
    ("url", "start"),
    [
        ("redis://u:p@h:1/2?prefix=mine:", "redis://u:p@h:1/2?prefix=mine:quire-bench-"),
        ("redis://h", "redis://h?prefix=quire:quire-bench-"),
        ("s3://bucket/a?region=x", "s3://bucket/a/quire-bench-"),
        ("file:///var/cache/?max=1GiB", "file:///var/cache/quire-bench-"),
        ("mooncake://h:1?replicas=2&codec=zstd", "mooncake://h:1?replicas=2&prefix=quire-bench-"),
    ],
)
def test_it_works_in_a_place_of_its_own(url, start):
    first, second = anystore.own_place(url).text, anystore.own_place(url).text
    assert first.startswith(start)
    assert first != second


def test_a_wrapper_has_no_such_place():
    with pytest.raises(StoreError, match="measure the store"):
        anystore.own_place("faulty+memory://")


def test_a_store_that_is_too_small_says_so():
    with anystore.measured("memory://", 8192) as bench:
        bench._backend.max_bytes = 0
        with pytest.raises(StoreError, match="--total"):
            bench.write(bench.keys(20))


# ---- the doctor ----------------------------------------------------------------------------------


def ways(bytes_per_s: float, asking_s: float, **changes) -> doctor.Ways:
    return doctor.Ways(machine_of(profile(**changes)), bytes_per_s, asking_s)


def test_the_crossover_is_where_fetching_becomes_faster():
    both = ways(4e9, asking_s=0.03)  # 25 µs a token fetched, 100 µs computed
    found = both.crossover()
    assert 395 <= found <= 405
    for tokens, helps in ((found - 1, False), (found, True), (2 * found, True)):
        assert (both.fetch_s(tokens) < both.compute_s(tokens)) is helps


def test_a_store_that_is_slower_than_computing_never_helps():
    assert ways(1e8, asking_s=0.01).crossover() is None


def test_attention_makes_long_prompts_worth_it():
    assert 10_000 < ways(5e8, asking_s=0.0, s_per_pair=1e-8).crossover() < doctor.LONGEST


def test_the_doctor_says_it_in_words_with_and_without_a_profile(tmp_path):
    steps = []
    url = f"file://{tmp_path}"
    found = doctor.examine(url, machine=None, progress=lambda *step: steps.append(step[0]), **SMALL)
    assert "quire profile" in found.sentences[-1]
    assert {"writing", "reading"} == set(steps)
    assert list(tmp_path.iterdir()) == []
    slow = profile(s_per_token=10.0)
    found = doctor.examine("memory://", machine=machine_of(slow), **SMALL)
    assert "It helps with a model on a device from" in found.sentences[-1]
    assert found.crossover_tokens is not None
    fast = profile(s_per_token=1e-12, bytes_per_token=1 << 40)
    found = doctor.examine("memory://", machine=machine_of(fast), **SMALL)
    assert "does not help" in found.sentences[-1]


# ---- the commands --------------------------------------------------------------------------------


def test_the_commands_print_tables_words_or_json(quire, tmp_path):
    sizes = ("--total", "64KiB", "--page", "8KiB")
    assert "store GB/s" in quire("store", "bench", "memory://", *sizes, "--rounds", "1").out
    assert quire("store", "doctor", f"file://{tmp_path}", *sizes, "--json").json["read_gb_s"] > 0
    assert "It gives" in quire("store", "doctor", f"file://{tmp_path}", *sizes).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bench", "memory://", "--page", "1000"), "multiple of"),
        (("bench", "memory://", "--total", "4KiB"), "less than one page"),
        (("bench", "memory://?codec=rot13"), "none, zstd, lz4"),
        (("doctor", "nothing"), "not a store URL"),
        (("doctor", "redis://user:s3cret@127.0.0.1:1"), "cannot be reached"),
        (("bench", "redis://u:s3cret@h s3://b?region=x"), "several stores"),
        (("bench", "redis://u:what s3cret@h"), "not a store URL"),
        (("bench", "memory://?write=never"), "is only read"),
        (("doctor", "redis://u:s3cret@h?write=never"), "is only read"),
        (("bench", "memory://", "--page", "8GiB", "--total", "8GiB"), "at most 1 GiB"),
        (("bench", "file:///nowhere/at/all"), "create it or correct the path"),
        (("doctor", "file:///nowhere/at/all"), "create it or correct the path"),
        (("bench", "file:///tmp?mx=1GiB"), "unknown option 'mx'"),
        (("bench", "nobodys://host?token=s3cret"), "known schemes are"),
        (("doctor", "nobodys://host?token=s3cret"), "known schemes are"),
    ],
)
def test_a_wrong_question_is_one_sentence_without_secrets(quire, words, said):
    ran = quire("store", *words)
    assert ran.code == 2
    assert said in ran.sentence
    assert "s3cret" not in ran.err + ran.out
