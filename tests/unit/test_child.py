"""A child whose parent is gone tidies up after it."""

import os
import threading
import time

import pytest

from quire.child import stop_when_orphaned

WAIT_S = 120.0


@pytest.mark.parametrize("was_told", [False, True], ids=["by surprise", "told to stop before"])
def test_who_sees_the_parent_go_removes_its_socket(tmp_path, monkeypatch, was_told):
    ended = threading.Event()
    monkeypatch.setattr("quire.child._ORPHAN_GRACE_S", 0.0)
    monkeypatch.setattr("os._exit", lambda _code: ended.set())
    socket = tmp_path / "quire-1" / "leader"
    socket.parent.mkdir()
    socket.touch()
    stop = threading.Event()
    if was_told:
        stop.set()
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as stream:
        stop_when_orphaned(stream, stop, f"ipc://{socket}")
        os.close(writing)
        deadline = time.monotonic() + WAIT_S
        while socket.parent.exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert stop.is_set()
        assert was_told or ended.wait(WAIT_S)
    assert not (was_told and ended.is_set())
