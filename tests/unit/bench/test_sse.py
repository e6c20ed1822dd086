"""Server-sent events, however they are cut into pieces."""

import pytest

from quire.bench.serve.chatting import EventParser

STREAM = (
    ": a comment\n"
    'data: {"a": 1}\n\n'
    "event: message\nid: 7\ndata: two\ndata:lines\n\n"
    "data: crlf\r\n\r\n"
    "data: cr\r\r"
    "data: a\u2028b\x0bc\x85d é\n\n"
    "\n\n"
    "data: [DONE]\n\n"
).encode()
EVENTS = ['{"a": 1}', "two\nlines", "crlf", "cr", "a\u2028b\x0bc\x85d é", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_come_out_however_they_arrive(size):
    parser = EventParser()
    pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in parser.feed(piece)] == EVENTS
    assert parser.is_between_events


@pytest.mark.parametrize("rest", [b"data: x", b"data: x\n"])
def test_an_event_that_does_not_end_is_noticed(rest):
    parser = EventParser()
    assert list(parser.feed(rest)) == []
    assert not parser.is_between_events
