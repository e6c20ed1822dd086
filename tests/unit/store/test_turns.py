"""A few calls at a time, and nobody waits for one that hangs."""

import threading

from quire.store.mooncake.turns import Turns

LONG_S = 30.0


class Call(threading.Thread):
    """Takes a turn, and keeps it until it is told to end."""

    def __init__(self, turns):
        super().__init__(daemon=True)
        self.turns, self.is_on, self.may_end = turns, threading.Event(), threading.Event()
        self.start()

    def run(self):
        with self.turns.turn():
            self.is_on.set()
            assert self.may_end.wait(LONG_S)

    def end(self):
        self.may_end.set()
        self.join(LONG_S)


def test_no_more_than_so_many_at_a_time():
    turns = Turns(2, still_s=LONG_S)
    first, second = Call(turns), Call(turns)
    assert first.is_on.wait(LONG_S)
    assert second.is_on.wait(LONG_S)
    third = Call(turns)
    assert not third.is_on.wait(0.05)
    first.end()
    assert third.is_on.wait(LONG_S)
    for call in (second, third):
        call.end()


def test_nobody_waits_for_one_that_hangs():
    turns = Turns(1, still_s=0.01)
    hangs = Call(turns)
    assert hangs.is_on.wait(LONG_S)
    others = [Call(turns) for _ in range(3)]
    assert all(call.is_on.wait(LONG_S) for call in others)
    for call in (*others, hangs):
        call.end()
    again = Call(turns)
    assert again.is_on.wait(LONG_S)
    again.end()


def test_what_fails_gives_its_turn_back():
    turns = Turns(1, still_s=LONG_S)
    try:
        with turns.turn():
            raise OSError
    except OSError:
        pass
    with turns.turn():
        pass
