"""Where models are cached, and that a directory appears there once and whole."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from quire.errors import ModelError
from quire.models.cache import build_once, cache_dir, no_progress

WAIT_S = 120.0
"""Only how long a broken test takes to fail."""


def test_the_cache_directory_is_the_users(monkeypatch):
    monkeypatch.delenv("QUIRE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path.home() / ".cache" / "quire"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "quire"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/quire")
    monkeypatch.setenv("QUIRE_CACHE_DIR", "/y")
    assert cache_dir() == Path("/y")


def write_half(part):
    (part / "half").write_text("1")
    (part.parent / "started").touch()


def write_slowly(part):
    write_half(part)
    time.sleep(0.3)
    with (part.parent / "builds").open("a") as log:
        log.write(f"{os.getpid()}\n")
    (part / "rest").write_text("2")


def write_when_told(part):
    write_half(part)
    wait_for(part.parent / "told")
    (part / "rest").write_text("2")


def hang(part):
    write_half(part)
    time.sleep(WAIT_S)


def start(target, build):
    process = multiprocessing.get_context("spawn").Process(
        target=build_once, args=(target, build, no_progress)
    )
    process.start()
    return process


def wait_for(path):
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.01)


def files(target):
    return {path.name: path.read_text() for path in target.iterdir()}


def parts(target):
    return [path.name for path in target.parent.iterdir() if path.name.endswith(".part")]


def test_of_several_processes_one_builds_and_the_others_wait(tmp_path):
    target = tmp_path / "models" / "m-1"
    processes = [start(target, write_slowly) for _ in range(3)]
    for process in processes:
        process.join(WAIT_S)
        assert process.exitcode == 0
    assert files(target) == {"half": "1", "rest": "2"}
    assert len((target.parent / "builds").read_text().splitlines()) == 1
    assert not parts(target)


def test_a_builder_killed_halfway_leaves_nothing_that_looks_complete(tmp_path):
    target = tmp_path / "models" / "m-1"
    process = start(target, hang)
    wait_for(target.parent / "started")
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT_S)
    assert not target.exists()
    assert parts(target)
    other = target.parent / ".m-1.other-2.77.part"
    other.mkdir()
    scratch = target.parent / ".m-1.77.abc.part"
    scratch.mkdir()

    build_once(target, write_slowly, no_progress)
    assert files(target) == {"half": "1", "rest": "2"}
    assert parts(target) == [other.name]


def test_who_waits_says_so(tmp_path):
    target = tmp_path / "models" / "m-1"
    process = start(target, write_when_told)
    wait_for(target.parent / "started")
    said = []

    def tell(what, done):
        said.append(what)
        (target.parent / "told").touch()

    build_once(target, write_slowly, tell)
    process.join(WAIT_S)
    assert any("waiting" in what for what in said)


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path):
    target = tmp_path / "models" / "m-1"

    def fail(part):
        (part / "half").write_text("1")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        build_once(target, fail, no_progress)
    assert not target.exists()
    assert not parts(target)
    build_once(target, write_slowly, no_progress)
    assert files(target) == {"half": "1", "rest": "2"}


def test_a_cache_that_cannot_be_written_is_an_error_with_the_way_out(tmp_path):
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelError, match="QUIRE_CACHE_DIR"):
        build_once(tmp_path / "models" / "m-1", write_slowly, no_progress)
