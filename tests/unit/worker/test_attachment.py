"""StoreSlot: a store is closed once, after its last user, and never under one."""

import pytest

from quire.worker.attachment import StoreSlot


@pytest.fixture
def closed():
    return []


@pytest.fixture
def slot(closed):
    return StoreSlot(closed.append)


def test_an_empty_slot_lends_nothing(slot):
    assert slot.borrow() is None


def test_an_unused_store_is_closed_when_replaced(slot, closed):
    slot.replace("old")
    slot.replace("new")
    assert closed == ["old"]
    slot.replace(None)
    assert closed == ["old", "new"]
    assert slot.borrow() is None


def test_a_used_store_is_closed_with_its_last_user(slot, closed):
    slot.replace("old")
    users = [slot.borrow(), slot.borrow()]
    slot.replace("new")
    assert slot.borrow().store == "new"
    users[0].release()
    assert closed == []
    users[1].release()
    assert closed == ["old"]


def test_returning_a_store_that_is_still_attached_closes_nothing(slot, closed):
    slot.replace("store")
    slot.borrow().release()
    assert closed == []
    assert slot.borrow().store == "store"
