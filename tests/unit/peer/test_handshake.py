"""The handshake: both prove the secret, nobody else gets anywhere, and a refusal says why."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.peer.errors import PeerError
from quire.peer.handshake import (
    Challenge,
    Handshake,
    Open,
    Proof,
    Purpose,
    Side,
    page_handshake,
)
from unit.peer.rig import SECRET, identity_of

OURS = identity_of()


def side(which, secret=SECRET, identity=OURS):
    return page_handshake(which, secret, identity)


def converse(dialer, listener):
    """What each side ends with: None, or its error."""
    ends = {}
    frame, turn = dialer.start(), listener
    while frame:
        try:
            frame = turn.feed(frame)
        except PeerError as error:
            ends[turn] = str(error)
            frame = error.reply
        turn = dialer if turn is listener else listener
    return ends.get(dialer), ends.get(listener)


def test_with_the_same_secret_and_identity_both_are_sure_of_each_other():
    dialer, listener = side(Side.DIALER), side(Side.LISTENER)
    assert converse(dialer, listener) == (None, None)
    assert dialer.done
    assert listener.done
    assert dialer.peer_card == listener.peer_card == msgspec.msgpack.encode(OURS)


def test_another_secret_is_refused_and_both_know_why():
    sentence = "the secrets differ: set the same peer_secret on both sides"
    dialer, listener = side(Side.DIALER, "wrong"), side(Side.LISTENER)
    assert converse(dialer, listener) == (f"the peer refused: {sentence}", sentence)
    assert not dialer.done
    assert not listener.done


@pytest.mark.parametrize(
    ("theirs", "said", "known"),
    [
        (identity_of(model="b"), "the peer's model weights are m and ours are b", "weights are b"),
        (
            msgspec.structs.replace(OURS, page_size=9),
            "the peer's page size is 4 and ours is 9",
            "page size is 9 and ours is 4",
        ),
        (
            msgspec.structs.replace(OURS, version=9),
            "the peer speaks format version 3 and we speak 9",
            "format version 9 and we speak 3",
        ),
    ],
)
def test_another_identity_is_refused_from_where_each_side_stands(theirs, said, known):
    at_dialer, at_listener = converse(side(Side.DIALER, identity=theirs), side(Side.LISTENER))
    assert at_dialer.startswith(f"the peer refused: {said}")
    assert known in at_listener


def test_the_wrong_port_says_so():
    leader = Handshake(Side.DIALER, Purpose.CONTROL, SECRET, b"", lambda card: None)
    at_dialer, _ = converse(leader, side(Side.LISTENER))
    assert "this port is for pages, not for control" in at_dialer


def test_a_listener_without_the_secret_is_not_believed():
    dialer = side(Side.DIALER)
    dialer.start()
    proof = dialer.feed(msgspec.msgpack.encode(Challenge(b"n" * 32)))
    # It can only give back what it was given: the proof carries its side.
    with pytest.raises(PeerError, match="secrets differ"):
        dialer.feed(proof)
    assert not dialer.done


def test_a_recorded_conversation_opens_no_door():
    dialer, listener = side(Side.DIALER), side(Side.LISTENER)
    opening = dialer.start()
    proof = dialer.feed(listener.feed(opening))
    listener.feed(proof)
    again = side(Side.LISTENER)
    again.feed(opening)
    with pytest.raises(PeerError, match="secrets differ"):
        again.feed(proof)


def test_the_card_is_covered_by_the_proof():
    dialer, listener = side(Side.DIALER), side(Side.LISTENER)
    proof = msgspec.msgpack.decode(dialer.feed(listener.feed(dialer.start())), type=Proof)
    changed = Proof(proof.mac, msgspec.msgpack.encode(identity_of(model="b")), False)
    with pytest.raises(PeerError, match="secrets differ"):
        listener.feed(msgspec.msgpack.encode(changed))


@pytest.mark.parametrize(
    "frame",
    [
        msgspec.msgpack.encode(Proof(b"", b"", False)),
        msgspec.msgpack.encode(Challenge(b"n" * 32)),
        msgspec.msgpack.encode(Open(3, Purpose.PAGES, b"short")),
        b"",
        b"\xc1",
    ],
)
def test_whatever_is_out_of_turn_gets_no_answer(frame):
    with pytest.raises(PeerError) as caught:
        side(Side.LISTENER).feed(frame)
    assert caught.value.reply == b""


@given(st.binary(max_size=200))
def test_random_bytes_get_no_answer(data):
    with pytest.raises(PeerError) as caught:
        side(Side.LISTENER).feed(data)
    assert caught.value.reply == b""


def test_a_refusal_is_shown_short_and_printable():
    refuse = {"t": "refuse", "reason": "\x1b[31m" + "x" * 10_000}
    with pytest.raises(PeerError) as caught:
        side(Side.DIALER).feed(msgspec.msgpack.encode(refuse))
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
