"""Attachment: a store is closed once, after its last user, and never under one."""

import time

import pytest

from quire.messages import AttachStore, ClearStore, DetachStore
from quire.worker.attachment import Attachment
from quire.worker.tasks import Reporter
from unit.worker.fakes import FakeStore


class Rig:
    """Changes are carried out when asked for, one after the other."""

    def __init__(self):
        self.errors, self.opened = [], {}
        reporter = Reporter(
            0, time.monotonic, lambda report: self.errors.append(report.error), self.errors.append
        )
        self.attachment = Attachment(self.opened.__getitem__, reporter, 16)

    def attach(self, name):
        self.opened[name] = FakeStore()
        self.change(AttachStore(1, name))
        return self.opened[name]

    def change(self, command):
        self.attachment._change(command)

    def borrow(self):
        return self.attachment.borrow()


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    assert rig.attachment.close(10)
    assert all(store.closed.is_set() for store in rig.opened.values())
    assert not rig.errors


def test_nothing_attached_lends_nothing(rig):
    assert rig.borrow() is None
    with pytest.raises(Exception, match="no store is attached"):
        rig.change(ClearStore(1))


def test_an_unused_store_is_closed_when_replaced(rig):
    old, new = rig.attach("old"), rig.attach("new")
    assert old.closed.wait(10)
    assert not new.closed.is_set()
    rig.change(DetachStore(1))
    assert new.closed.wait(10)
    assert rig.borrow() is None


def test_a_used_store_is_closed_with_its_last_user(rig):
    old = rig.attach("old")
    users = [rig.borrow(), rig.borrow()]
    new = rig.attach("new")
    lease = rig.borrow()
    assert lease.store is new
    lease.release()
    users[0].release()
    assert not old.closed.is_set()
    users[1].release()
    assert old.closed.wait(10)


def test_returning_a_store_that_is_still_attached_closes_nothing(rig):
    store = rig.attach("store")
    lease = rig.borrow()
    lease.release()
    assert not store.closed.is_set()
    again = rig.borrow()
    assert again.store is store
    again.release()
