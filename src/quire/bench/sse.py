"""Server-sent events, byte by byte: the part of the format that OpenAI-compatible servers use.

Lines end with \\n, \\r\\n or \\r and nothing else: text inside an event may hold any other
character that Python would take for the end of a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventParser:
    """Give it what arrives; it yields the data of every event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[str]:
        # A \r at the very end may be half of a \r\n: it waits for the next piece.
        buffer = self._rest + piece
        end = len(buffer) - 1 if buffer.endswith(b"\r") else len(buffer)
        at = 0
        for match in _LINE_END.finditer(buffer, 0, end):
            yield from self._line(buffer[at : match.start()])
            at = match.end()
        self._rest = buffer[at:]

    @property
    def is_between_events(self) -> bool:
        """Nothing has been received of an event that did not end."""
        return not self._rest.strip() and not self._data

    def _line(self, line: bytes) -> Iterator[str]:
        if not line:
            if self._data:
                yield b"\n".join(self._data).decode("utf-8")
                self._data = []
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        # Comments (":..."), ids and event names say nothing that a client here needs.
