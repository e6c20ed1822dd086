"""Pages that are wrong although they are whole: misses until the store has let go of them."""

from quire.store.base import ObjectName
from quire.store.disowned import Disowned
from quire.types import PageKey

ONE, TWO = (ObjectName(PageKey(bytes([n]) * 32), "full", 0, 1) for n in (1, 2))


def test_what_is_disowned_stays_so_until_it_is_taken_out():
    taken: list[ObjectName] = []
    disowned = Disowned(lambda name: not taken.append(name))
    disowned.add([ONE])
    assert ONE in disowned
    assert TWO not in disowned
    disowned.take_out([ONE, TWO])
    assert taken == [ONE]
    assert not disowned


def test_what_the_store_does_not_let_go_of_stays():
    disowned = Disowned(lambda name: False)
    disowned.add([ONE])
    disowned.take_out([ONE])
    assert ONE in disowned


def test_what_is_being_written_is_taken_out_by_the_last_who_writes_it():
    taken: list[ObjectName] = []
    disowned = Disowned(lambda name: not taken.append(name))
    with disowned.writing([ONE, TWO]):
        disowned.add([ONE])
        with disowned.writing([ONE]):  # also who began later: which of them is first is not known
            disowned.take_out([ONE])
            assert disowned.is_stale(ONE)
        assert not taken
        assert ONE in disowned
    assert taken == [ONE]
    assert not disowned


def test_who_begins_afterwards_writes_it_anew():
    disowned = Disowned(lambda name: True)
    disowned.add([ONE])
    with disowned.writing([ONE]):
        assert not disowned.is_stale(ONE)
        disowned.take_out([ONE])
        assert ONE not in disowned
