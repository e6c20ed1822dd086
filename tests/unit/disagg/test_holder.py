"""What an engine that has pages says to peers that ask for them, and what it holds for whom."""

from __future__ import annotations

import numpy as np
import pytest

from quire.disagg.holder import Holder
from quire.keys import PrefixKey
from quire.manager import Lease
from quire.peer.messages import Abort, Ask, Complete, Done, Found, Offer, PeerMessage, Refused
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

    def begin(self, name: str, ask: Ask) -> str:
        raise AssertionError(f"{name} is not to be computed: {ask}")

    def lease(self, name: str) -> Lease | None:
        raise AssertionError(name)

    def found(self, name: str) -> Found:
        raise AssertionError(name)

    def is_waiting(self, name: str) -> bool:
        raise AssertionError(name)

    def failure(self, name: str) -> str:
        raise AssertionError(name)

    def end(self, name: str) -> None:
        raise AssertionError(name)


class Giving:
    """A holder over a scripted cache; what it says is kept."""

    def __init__(self, mix: str = "full") -> None:
        self.rig = Rig(mix=mix, store=False)
        self.said: list[PeerMessage] = []
        self.holder = Holder(
            self.rig.manager,
            NothingComputed(self.rig),
            clock=lambda: self.rig.now,
            send=self._send,
        )

    def ask(self, key: PrefixKey, first: int, *, name: str = "a", priority: int = 0) -> Ask:
        return Ask(name, key.tokens.tobytes(), "", first, key.num_pages, False, 1.0, priority)

    def _send(self, _link: str, message: PeerMessage) -> bool:
        self.said.append(message)
        return True

    def turn(self) -> list[PeerMessage]:
        """One step of its engine; what it said in it."""
        self.said.clear()
        self.holder.advance()
        self.rig.step()
        self.holder.flush()
        return list(self.said)


@every_mix
@pytest.mark.parametrize("has", [0, 2, 6])
def test_a_peer_learns_at_once_what_it_can_have_also_if_that_is_nothing(mix: str, has: int) -> None:
    """It asks from page 4 on; who has less than that says so, and does not keep it waiting."""
    giving = Giving(mix)
    key = giving.rig.doc(6, seed=1)
    if has:
        giving.rig.cache(key[:has])
    giving.holder.received(LINK, giving.ask(key, 4))
    said = giving.turn()
    (complete,) = [message for message in said if isinstance(message, Complete)]
    offers = [message for message in said if isinstance(message, Offer)]
    assert complete.last == max(has, 4)
    assert complete.offers == len(offers)
    assert bool(offers) == (has > 4)
    giving.holder.received(LINK, Done("a"))
    assert not giving.holder.open
    assert not giving.rig.manager.leases


@pytest.mark.parametrize("last_word", [Abort("a"), Done("a")])
def test_nothing_is_held_for_a_peer_whose_last_word_came_before_its_first(
    last_word: Abort | Done,
) -> None:
    giving = Giving()
    key = giving.rig.doc(6, seed=1)
    giving.rig.cache(key)
    giving.holder.received(LINK, last_word)
    giving.holder.received(LINK, giving.ask(key, 0))
    assert giving.turn() == []
    assert not giving.holder.open
    assert not giving.rig.manager.leases


def test_what_is_remembered_of_refused_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.disagg.holder._REMEMBERED", 8)
    giving = Giving()
    key = giving.rig.doc(2, seed=1)
    for n in range(20):
        giving.holder.received(LINK, giving.ask(key, 0, name=f"a{n}", priority=-1))
    assert [type(message) for message in giving.said] == [Refused] * 20
    assert len(giving.holder._over) == 8
