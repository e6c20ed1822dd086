"""Span, and the TraceContext it belongs to: W3C's `traceparent` in, OTLP's JSON out.

    traceparent   00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
                  version  trace, 16 bytes           span, 8 bytes    sampled

Knows how both are written; no clock, no socket. In OTLP's JSON ids are hex and 64-bit numbers are
strings.
"""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Attribute = str | bool | int | float

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


class TraceContext(NamedTuple):
    """One span's place among all: what is told to whoever does a part of the work."""

    trace: str
    span: str
    is_sampled: bool = True

    @classmethod
    def new(cls) -> TraceContext:
        """Of a trace that begins here."""
        return cls(secrets.token_hex(16), secrets.token_hex(8))

    @classmethod
    def read(cls, header: str) -> TraceContext | None:
        """None: it is not one. A version after 00 may have more behind it, and 00 may not."""
        found = _TRACEPARENT.fullmatch(header.strip())
        if found is None:
            return None
        version, trace, span, flags, rest = found.groups()
        if version == "ff" or (version == "00" and rest):
            return None
        if not trace.strip("0") or not span.strip("0"):
            return None
        return cls(trace, span, bool(int(flags, 16) & _SAMPLED))

    @property
    def header(self) -> str:
        return f"00-{self.trace}-{self.span}-{int(self.is_sampled):02x}"

    def child(self) -> TraceContext:
        """Of a span within this one."""
        return self._replace(span=secrets.token_hex(8))


class SpanKind(enum.IntEnum):
    """As OTLP numbers them."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class SpanEvent(NamedTuple):
    name: str
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that was done, from its begin to its end. Times since 1970."""

    context: TraceContext
    parent: str
    """The id of the span it is a part of; empty: of none."""
    name: str
    kind: SpanKind
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Attribute]
    events: Sequence[SpanEvent] = ()
    error: str = ""
    """What went wrong; empty: nothing."""

    def as_json(self) -> dict[str, Any]:
        written: dict[str, Any] = {
            "traceId": self.context.trace,
            "spanId": self.context.span,
            "name": self.name,
            "kind": int(self.kind),
            "startTimeUnixNano": str(self.began_ns),
            "endTimeUnixNano": str(max(self.began_ns, self.ended_ns)),
            "attributes": attributes(self.attributes),
        }
        if self.parent:
            written["parentSpanId"] = self.parent
        if self.events:
            written["events"] = [
                {"name": event.name, "timeUnixNano": str(event.at_ns)} for event in self.events
            ]
        if self.error:
            written["status"] = {"code": 2, "message": self.error}
        return written


def attributes(values: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in values.items()]


def _value(value: Attribute) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}
