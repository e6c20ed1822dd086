"""Collector: what takes spans by OTLP over HTTP, for tests. A real HTTP server in a thread, which
reads what it gets as the specification says it is written."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """The bound is there so that a broken test ends."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)


@dataclass
class Taken:
    """A span, as it came."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    began_ns: int
    ended_ns: int
    about: dict[str, Any]
    resource: dict[str, Any]
    events: list[str]
    error: str


@dataclass
class Collector:
    answer: tuple[int, Any] = (200, {})
    """Status and body."""
    spans: list[Taken] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""

    def named(self, name: str, count: int = 1) -> list[Taken]:
        """Until so many of that name have come."""

        def found() -> list[Taken]:
            return [span for span in list(self.spans) if span.name == name]

        wait_until(lambda: len(found()) >= count, f"{count} spans {name!r} in {self.spans}")
        return found()

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for group in json.loads(body)["resourceSpans"]:
            resource = _values(group["resource"]["attributes"])
            for scope in group["scopeSpans"]:
                assert scope["scope"]["name"] == "quire"
                self.spans += [_taken(each, resource) for each in scope["spans"]]


def _taken(span: dict[str, Any], resource: dict[str, Any]) -> Taken:
    assert len(bytes.fromhex(span["traceId"])) == 16
    assert len(bytes.fromhex(span["spanId"])) == 8
    return Taken(
        span["name"],
        span["traceId"],
        span["spanId"],
        span.get("parentSpanId", ""),
        span["kind"],
        _int64(span["startTimeUnixNano"]),
        _int64(span["endTimeUnixNano"]),
        _values(span["attributes"]),
        resource,
        [event["name"] for event in span.get("events", [])],
        span.get("status", {}).get("message", ""),
    )


def _values(written: list[dict[str, Any]]) -> dict[str, Any]:
    read: dict[str, Callable[[Any], Any]] = {
        "stringValue": str,
        "boolValue": bool,
        "intValue": _int64,
        "doubleValue": float,
    }
    found = {}
    for each in written:
        ((kind, value),) = each["value"].items()
        found[each["key"]] = read[kind](value)
    return found


def _int64(text: Any) -> int:
    assert isinstance(text, str), "64-bit numbers are strings in protobuf's JSON"
    return int(text)


@contextlib.contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, content = collector.answer
            if status == 200:
                collector.take(self.path, body)
            answer = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
