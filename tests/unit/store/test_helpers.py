"""Threads for calls side by side, on a machine that has no more of them."""

import threading

import pytest

from quire.errors import StoreError
from quire.store.helpers import MAX_OPEN, Helpers


@pytest.fixture
def no_threads(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield patch


def test_calls_fail_while_no_thread_can_be_had_and_go_on_afterwards(no_threads):
    helpers = Helpers("helper", 2)
    for _ in range(MAX_OPEN + 1):
        with pytest.raises(StoreError, match="can't start new thread"):
            helpers.start(lambda: 1).result(timeout=60)
    assert helpers.num_open == 0
    no_threads.undo()
    assert helpers.start(lambda: 1).result(timeout=60) == 1
    helpers.close()


def test_calls_wait_for_the_threads_there_are(monkeypatch, no_threads):
    no_threads.undo()
    helpers, going_on = Helpers("helper", 2), threading.Event()
    first = helpers.start(going_on.wait)
    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError()))
    second = helpers.start(lambda: 2)
    going_on.set()
    assert first.result(timeout=60)
    assert second.result(timeout=60) == 2
    helpers.close()
