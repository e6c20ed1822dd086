"""Whose pages fit ours, and the sentence for those that do not."""

import msgspec
import pytest

from quire.memory.page_layout import InnerLayout, PageLayout
from quire.peer.identity import FORMAT_VERSION, Identity, make_identity, why_not

FULL = PageLayout("full", 3, 2, 8, "float32", 4)
STATES = PageLayout("recurrent", 2, 1, 999, "uint8", 1, num_planes=1)
OURS = make_identity("weights-a", [FULL, STATES], {"full": 4, "recurrent": 1})


def other(**changes):
    return msgspec.structs.replace(OURS, **changes)


def with_component(**changes):
    first, *rest = OURS.components
    return other(components=[msgspec.structs.replace(first, **changes), *rest])


def test_ranks_with_other_shares_of_the_heads_are_the_same_engine():
    one_head = PageLayout("full", 3, 1, 8, "float32", 4)
    assert make_identity("weights-a", [one_head, STATES], {"full": 4, "recurrent": 1}) == OURS
    assert why_not(OURS, OURS) == ""
    assert OURS.version == FORMAT_VERSION


def test_it_travels():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(OURS), type=Identity) == OURS


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (
            other(version=99),
            "the peer speaks format version 99 and we speak 3: run the same version of Quire on "
            "both sides",
        ),
        (
            other(model_fingerprint="weights-b"),
            "the peer's model weights are weights-b and ours are weights-a: serve the same model "
            "files on both sides",
        ),
        (
            other(page_size=16),
            "the peer's page size is 16 and ours is 4: set the same page_size on both sides",
        ),
        (
            other(dtype="bfloat16"),
            "the peer keeps its pages in bfloat16 and we in float32: set the same dtype on both "
            "sides",
        ),
        (
            other(components=OURS.components[:1]),
            "the peer's pages have the parts full and ours full, recurrent: run the same version "
            "of Quire with the same model on both sides",
        ),
        (
            with_component(inner=InnerLayout.HND.value),
            "the peer's layout of 'full' has inner hnd and ours nhd: use the same model, dtype and "
            "page layout on both sides",
        ),
        (
            with_component(num_heads=8),
            "the peer's layout of 'full' has num_heads 8 and ours 4: use the same model, dtype and "
            "page layout on both sides",
        ),
    ],
)
def test_what_differs_is_said_in_one_sentence_with_the_fix(theirs, expected):
    assert why_not(OURS, theirs) == expected
    assert why_not(theirs, OURS)


def test_what_a_stranger_sends_does_not_flood_the_message():
    reason = why_not(OURS, other(model_fingerprint="\x1b[2J" + "x" * 100_000))
    assert len(reason) < 300
    assert reason.isprintable()
