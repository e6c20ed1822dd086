"""TextStream: what is certain comes out, and how the bytes were cut does not matter."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from quire.text.decoding import TextStream

PIECES = st.lists(st.binary(max_size=4), max_size=12)
# Few letters, so that stop strings occur, overlap and begin each other.
LETTERS = st.text("abé😀", max_size=20)
STOPS = st.lists(st.text("abé😀", min_size=1, max_size=4), max_size=3)


def streamed(pieces, stops=()):
    """(every piece of text, whether it stopped)"""
    stream = TextStream(stops)
    texts = [stream.push(piece) for piece in pieces]
    return [*texts, stream.finish()], stream.stopped


def expected(text, stops):
    """Character by character: the first stop string to be completed, the longest of them."""
    for end in range(1, len(text) + 1):
        ends = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - max(ends)], True
    return text, False


def cut(data, places):
    places = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def test_a_character_cut_by_tokens_comes_out_whole():
    texts, _ = streamed([b"\xf0", b"\x9f\x98", b"\x80", b"!"])
    assert texts == ["", "", "😀", "!", ""]


def test_an_unfinished_character_at_the_end_is_one_replacement():
    texts, _ = streamed([b"a", b"\xe2\x82"])
    assert texts == ["a", "", "\ufffd"]


def test_bytes_that_are_no_character_are_replaced_as_soon_as_that_is_certain():
    assert streamed([b"\x80", b"a"])[0] == ["\ufffd", "a", ""]
    assert streamed([b"\xe2", b"a"])[0] == ["", "\ufffda", ""]


def test_what_may_begin_a_stop_string_is_held_back():
    texts, stopped = streamed([b"one", b" S", b"T", b"OP", b" more"], ["STOP"])
    assert texts == ["one", " ", "", "", "", ""]
    assert stopped


def test_what_turns_out_not_to_be_a_stop_string_comes_out():
    texts, stopped = streamed([b"S", b"T", b"ART", b"S"], ["STOP"])
    assert texts == ["", "", "START", "", "S"]
    assert not stopped


def test_the_stop_string_completed_first_counts():
    assert streamed([b"xabcd"], ["abcd", "b"])[0] == ["xa", ""]
    assert streamed([b"xabcd"], ["bc", "abc"])[0] == ["x", ""]


def test_a_stop_string_made_of_a_replacement_stops_at_the_end():
    texts, stopped = streamed([b"a", b"\xe2"], ["\ufffd"])
    assert "".join(texts) == "a"
    assert stopped


@given(PIECES)
@example([b"\xe2", b"\x82", b"\xac"])
@example([b"\xf0\x9f", b"\xf0\x9f"])
def test_what_comes_out_is_the_whole_decoding(pieces):
    texts, _ = streamed(pieces)
    assert "".join(texts) == b"".join(pieces).decode("utf-8", "replace")


@given(LETTERS, st.lists(st.integers(0, 60), max_size=8))
def test_no_replacement_comes_out_of_good_text(text, places):
    texts, _ = streamed(cut(text.encode(), places))
    assert "\ufffd" not in "".join(texts)


@given(LETTERS, STOPS, st.lists(st.integers(0, 60), max_size=8))
@example("aab", ["ab"], [1])
@example("aaab", ["aab", "ab"], [2])
def test_stops_do_not_depend_on_the_cuts(text, stops, places):
    texts, stopped = streamed(cut(text.encode(), places), stops)
    assert ("".join(texts), stopped) == expected(text, stops)


@given(LETTERS, STOPS, st.lists(st.integers(0, 60), max_size=8))
def test_what_has_come_out_is_never_taken_back(text, stops, places):
    whole, _ = expected(text, stops)
    texts, _ = streamed(cut(text.encode(), places), stops)
    for i in range(len(texts) + 1):
        assert whole.startswith("".join(texts[:i]))


@given(LETTERS, STOPS)
def test_nothing_is_held_back_without_a_reason(text, stops):
    stream = TextStream(stops)
    out = stream.push(text.encode())
    held = text[len(out) :]
    if not stream.stopped:
        assert not held or any(stop.startswith(held) for stop in stops)
