"""The simulated lines: what PeerHub promises, and what it does not."""

from __future__ import annotations

from random import Random

import pytest

from quire.peer.hub import Connected, Disconnected, Hello, Received
from quire.peer.identity import Identity
from quire.peer.messages import Abort, Done, PeerMessage
from quire.sim.clock import VirtualClock
from quire.sim.content import Pools, content_of, on_rank
from quire.sim.network import SILENCE_S, NetworkTrouble, SimHub, SimNetwork
from quire.sim.peers import LineState, Serving
from quire.types import OperationId, Tier

IDENTITY = Identity(1, "model", 4, "float32", [])
HERE, THERE = "tcp://here:1", "tcp://there:1"


class Lines:
    """Two engines, the first of which keeps a link to the second."""

    def __init__(self, trouble: NetworkTrouble | None = None) -> None:
        self.clock = VirtualClock()
        self.network = SimNetwork(self.clock, Random(1), trouble or NetworkTrouble())
        self.here = self.network.open(Hello(IDENTITY, "e1"), HERE)
        self.there = self.network.open(Hello(IDENTITY, "e2"), THERE)
        self.here.connect(THERE)
        self.wait(1.0)

    def wait(self, seconds: float) -> None:
        for _ in range(100):
            self.clock.advance(seconds / 100)
            self.network.advance()

    def received(self, hub: SimHub) -> list[PeerMessage]:
        return [event.message for event in hub.poll() if isinstance(event, Received)]


def test_both_ends_hear_of_a_link_and_messages_come_in_order() -> None:
    lines = Lines()
    assert lines.here.poll() == [Connected(THERE, lines.there.hello)]
    assert lines.there.poll() == [Connected("in-1", lines.here.hello)]
    sent: list[PeerMessage] = [Done(str(i)) for i in range(20)]
    assert all(lines.here.send(THERE, message) for message in sent)
    lines.wait(1.0)
    assert lines.received(lines.there) == sent
    assert lines.there.send("in-1", Abort("x"))
    lines.wait(1.0)
    assert lines.received(lines.here)[-1:] == [Abort("x")]


def test_messages_come_twice_and_overtake_each_other_when_told_to() -> None:
    lines = Lines(NetworkTrouble(duplicated=0.5, reordered=0.5))
    for i in range(40):
        lines.here.send(THERE, Done(str(i)))
    lines.wait(1.0)
    names = [message.id for message in lines.received(lines.there) if isinstance(message, Done)]
    assert set(names) == {str(i) for i in range(40)}
    assert len(names) > 40
    assert names != sorted(names, key=int)


def test_a_link_that_is_cut_comes_back_and_what_was_under_way_is_lost() -> None:
    lines = Lines()
    lines.here.send(THERE, Done("lost"))
    lines.network.disturb(HERE, THERE, LineState.CUT, 2.0)
    lines.wait(SILENCE_S + 0.1)
    assert not lines.received(lines.there)
    kinds = [type(event) for event in lines.here.poll()]
    assert kinds[0] is Connected
    assert kinds[1] is Disconnected
    lines.wait(3.0)
    assert lines.here.send(THERE, Done("again"))
    lines.wait(1.0)
    assert Done("again") in lines.received(lines.there)


@pytest.mark.parametrize(("seconds", "survives"), [(SILENCE_S - 1, True), (SILENCE_S + 1, False)])
def test_a_stalled_link_is_given_up_after_a_long_silence(seconds: float, survives: bool) -> None:
    lines = Lines()
    lines.network.disturb(HERE, THERE, LineState.STALLED, seconds)
    assert lines.here.send(THERE, Done("late"))
    lines.wait(seconds - 0.1)
    assert not lines.received(lines.there)
    lines.wait(1.0)
    assert (lines.received(lines.there) == [Done("late")]) is survives


def test_the_other_end_of_an_engine_that_dies_notices_at_once() -> None:
    lines = Lines()
    lines.here.poll()
    lines.there.close()
    (event,) = lines.here.poll()
    assert isinstance(event, Disconnected)
    assert not lines.here.send(THERE, Done("nobody"))
    fresh = lines.network.open(Hello(IDENTITY, "e3"), THERE)
    lines.wait(3.0)
    assert Connected(THERE, fresh.hello) in lines.here.poll()


def test_shards_are_turned_back_into_their_page() -> None:
    for rank in range(2):
        number = on_rank(123, rank, "window")
        assert content_of(number, rank, "window") == 123
        assert content_of(number, rank, "full") is None
        assert content_of(number, 1 - rank, "window") is None
    assert content_of(-5, 0) is None


def test_a_reader_sees_a_page_only_when_all_ranks_agree_on_it() -> None:
    pools = Pools(2, {"full": (4, 4)})
    serving = Serving(pools, "e", HERE)
    for rank in range(2):
        pools.write_shard(rank, 3, 77, "full")
        serving.grant(rank, OperationId(5), "full", [3, 2])
    reading = serving.enter(OperationId(5), "full")
    assert reading is not None
    assert reading.contents(range(2)) == [77, None]
    pools.scribble(1, Tier.HOST, [3])
    assert reading.contents(range(1)) == [None]


def test_a_grant_ends_with_its_last_reader() -> None:
    serving = Serving(Pools(1, {"full": (4, 4)}), "e", HERE)
    serving.grant(0, OperationId(5), "full", [1])
    reading = serving.enter(OperationId(5), "full")
    assert reading is not None
    freed: list[OperationId] = []
    serving.revoke(0, OperationId(5), lambda rank, op, component, count: freed.append(op))
    assert serving.enter(OperationId(5), "full") is None
    assert not freed
    reading.leave()
    assert freed == [OperationId(5)]
