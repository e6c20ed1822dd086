"""Which trace a request belongs to, and what a span looks like on its way."""

import pytest

from quire.tracing.spans import Span, SpanKind, TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_traceparent_is_read_and_written_as_w3c_says():
    header = f"00-{TRACE}-{SPAN}-01"
    context = TraceContext.read(header)
    assert context == TraceContext(TRACE, SPAN, is_sampled=True)
    assert context.header == header
    assert TraceContext.read(f"00-{TRACE}-{SPAN}-00") == TraceContext(TRACE, SPAN, False)
    # A version that is to come may say more.
    assert TraceContext.read(f"cc-{TRACE}-{SPAN}-09-more") == TraceContext(TRACE, SPAN, True)
    child = context.child()
    assert child.trace == TRACE
    assert child.span != SPAN


@pytest.mark.parametrize(
    "header",
    [
        "",
        "hello",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
    ],
)
def test_what_is_not_a_traceparent_is_none(header):
    assert TraceContext.read(header) is None


def test_a_span_is_written_as_otlp_says():
    span = Span(
        context=TraceContext(TRACE, SPAN),
        parent="",
        name="generate",
        kind=SpanKind.INTERNAL,
        began_ns=5,
        ended_ns=3,  # two clocks, or one that was set back
        attributes={"count": 1 << 40, "share": 0.5, "is": True, "who": "me"},
        error="timeout",
    )
    assert span.as_json() == {
        "traceId": TRACE,
        "spanId": SPAN,
        "name": "generate",
        "kind": 1,
        "startTimeUnixNano": "5",
        "endTimeUnixNano": "5",
        "attributes": [
            {"key": "count", "value": {"intValue": str(1 << 40)}},
            {"key": "share", "value": {"doubleValue": 0.5}},
            {"key": "is", "value": {"boolValue": True}},
            {"key": "who", "value": {"stringValue": "me"}},
        ],
        "status": {"code": 2, "message": "timeout"},
    }
