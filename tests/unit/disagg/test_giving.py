"""What an engine that has pages says to peers that ask for them, and what it holds for whom."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.disagg.giving import Giver, Handout, describe_handout
from quire.keys import PrefixKey
from quire.manager import Lease
from quire.peer.messages import (
    Abort,
    Ask,
    Complete,
    Done,
    Found,
    Offer,
    PeerMessage,
    Refused,
    Wait,
)
from support import MIXES, Rig

LINK = "in-1"
every_mix = pytest.mark.parametrize("mix", MIXES)


class NothingComputed:
    """Only what is there is given."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def problem(self, ask: Ask) -> str:
        return "" if ask.priority >= 0 else "it cannot be taken"

    def key(self, ask: Ask) -> PrefixKey:
        return PrefixKey(self._rig.namespace, np.frombuffer(ask.tokens, dtype="<i4"))

    def is_full(self) -> bool:
        raise AssertionError("nothing is to be computed")

    def begin(self, name: str, ask: Ask) -> str:
        raise AssertionError(f"{name} is not to be computed: {ask}")

    def lease(self, name: str) -> Lease | None:
        raise AssertionError(name)

    def found(self, name: str) -> Found:
        raise AssertionError(name)

    def is_waiting(self, name: str) -> bool:
        raise AssertionError(name)

    def is_kept(self, name: str) -> bool:
        raise AssertionError(name)

    def failure(self, name: str) -> str:
        raise AssertionError(name)

    def end(self, name: str) -> None:
        raise AssertionError(name)


class Computing(NothingComputed):
    """So many at a time, and each for as long as the test likes."""

    def __init__(self, rig: Rig, at_once: int) -> None:
        super().__init__(rig)
        self._at_once = at_once
        self.names: list[str] = []

    def is_full(self) -> bool:
        return len(self.names) >= self._at_once

    def begin(self, name: str, ask: Ask) -> str:
        assert not self.is_full()
        self.names.append(name)
        return ""

    def lease(self, name: str) -> Lease | None:
        return None

    def is_waiting(self, name: str) -> bool:
        return True

    def failure(self, name: str) -> str:
        return ""

    def end(self, name: str) -> None:
        if name in self.names:
            self.names.remove(name)


class Giving:
    """A giver over a scripted cache; what it says is kept."""

    def __init__(
        self,
        mix: str = "full",
        *,
        at_once: int = 0,
        host: int = 64,
        on_end: Callable[[Handout], None] = lambda _: None,
    ) -> None:
        self.rig = Rig(mix=mix, store=False, host=host)
        self.said: list[PeerMessage] = []
        self.computes = Computing(self.rig, at_once) if at_once else NothingComputed(self.rig)
        self.giver = Giver(
            self.rig.manager,
            self.computes,
            clock=lambda: self.rig.now,
            send=self._send,
            on_end=on_end,
        )

    def ask(self, key: PrefixKey, first: int, *, name: str = "a", priority: int = 0) -> Ask:
        compute = isinstance(self.computes, Computing)
        return Ask(name, key.tokens.tobytes(), "", first, key.num_pages, compute, 1.0, priority)

    def _send(self, _link: str, message: PeerMessage) -> bool:
        self.said.append(message)
        return True

    def turn(self) -> list[PeerMessage]:
        """One step of its engine; what it said in it."""
        self.said.clear()
        self.giver.advance()
        self.rig.step()
        self.giver.flush()
        return list(self.said)


@every_mix
@pytest.mark.parametrize("has", [0, 2, 6])
def test_a_peer_learns_at_once_what_it_can_have_also_if_that_is_nothing(mix: str, has: int) -> None:
    """It asks from page 4 on; who has less than that says so, and does not keep it waiting."""
    giving = Giving(mix)
    key = giving.rig.doc(6, seed=1)
    if has:
        giving.rig.cache(key[:has])
    giving.giver.received(LINK, giving.ask(key, 4))
    said = giving.turn()
    (complete,) = [message for message in said if isinstance(message, Complete)]
    offers = [message for message in said if isinstance(message, Offer)]
    assert complete.last == max(has, 4)
    assert complete.offers == len(offers)
    assert bool(offers) == (has > 4)
    giving.giver.received(LINK, Done("a"))
    assert not giving.giver.open
    assert not giving.rig.manager.leases


@pytest.mark.parametrize("last_word", [Abort("a"), Done("a")])
def test_nothing_is_held_for_a_peer_whose_last_word_came_before_its_first(
    last_word: Abort | Done,
) -> None:
    giving = Giving()
    key = giving.rig.doc(6, seed=1)
    giving.rig.cache(key)
    giving.giver.received(LINK, last_word)
    giving.giver.received(LINK, giving.ask(key, 0))
    assert giving.turn() == []
    assert not giving.giver.open
    assert not giving.rig.manager.leases


def test_what_is_remembered_of_refused_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.disagg.giving._REMEMBERED", 8)
    giving = Giving()
    key = giving.rig.doc(2, seed=1)
    for n in range(20):
        giving.giver.received(LINK, giving.ask(key, 0, name=f"a{n}", priority=-1))
    assert [type(message) for message in giving.said] == [Refused] * 20
    assert len(giving.giver._over) == 8


def test_it_is_told_of_under_the_name_by_which_it_was_asked_for() -> None:
    """The receiver has the same in its log: see test_ahead.py."""
    ended: list[Handout] = []
    giving = Giving(on_end=ended.append)
    key = giving.rig.doc(6, seed=1)
    giving.rig.cache(key)
    giving.giver.received(LINK, giving.ask(key, 2, name="d-7"))
    giving.turn()
    giving.rig.now += 0.25
    giving.giver.received(LINK, Done("d-7"))
    (handout,) = ended
    about = describe_handout(handout, giving.rig.now)
    assert (about["id"], about["peer"]) == ("d-7", LINK)
    assert (about["first"], about["last"], about["completed"]) == (2, 6, 1)
    assert about["seconds"] == 0.25


def computing(giving: Giving) -> list[str]:
    assert isinstance(giving.computes, Computing)
    return [name.removeprefix(f"{LINK}/") for name in giving.computes.names]


def test_a_full_prefill_server_says_wait_and_begins_in_order_of_arrival_c47() -> None:
    giving = Giving(at_once=2)
    for name in "abcd":
        giving.giver.received(LINK, giving.ask(giving.rig.doc(4, seed=ord(name)), 0, name=name))
    assert giving.turn() == []
    assert computing(giving) == ["a", "b"]
    giving.rig.now += 0.5
    assert giving.turn() == [Wait(name) for name in "abcd"]
    giving.giver.received(LINK, Abort("a"))
    giving.turn()
    assert computing(giving) == ["b", "c"]


def test_room_is_given_in_order_of_arrival_and_who_waits_for_it_takes_none_c46() -> None:
    """A small one does not overtake a large one, and nothing is computed that cannot be kept."""
    giving = Giving(at_once=9, host=8)
    for name, pages in {"a": 5, "b": 6, "c": 1}.items():
        giving.giver.received(LINK, giving.ask(giving.rig.doc(pages, seed=pages), 0, name=name))
    giving.turn()
    assert computing(giving) == ["a"]
    giving.giver.received(LINK, Done("a"))
    giving.turn()
    assert computing(giving) == ["b", "c"]


def test_what_is_still_read_is_kept_and_what_nobody_reads_is_not_c45() -> None:
    giving = Giving()
    key = giving.rig.doc(6, seed=1)
    giving.rig.cache(key)
    for name in "ab":
        giving.giver.received(LINK, giving.ask(key, 0, name=name))
    giving.turn()
    for _ in range(10):
        giving.rig.now += 0.5
        giving.giver.received(LINK, Wait("a"))
        giving.turn()
    assert list(giving.giver.open) == [(LINK, "a")]


def test_an_engine_that_is_to_stop_gives_what_it_has_begun_and_begins_no_more() -> None:
    giving = Giving()
    key = giving.rig.doc(6, seed=1)
    giving.rig.cache(key)
    giving.giver.received(LINK, giving.ask(key, 0))
    giving.giver.is_draining = True
    giving.giver.received(LINK, giving.ask(key, 0, name="b"))
    assert isinstance(giving.said[0], Refused)
    assert any(isinstance(message, Offer) for message in giving.turn())
    giving.giver.received(LINK, Done("a"))
    assert not giving.giver.open
