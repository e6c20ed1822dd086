"""Server-sent events, byte by byte: the part of the format that OpenAI-compatible servers use.

Lines end with \\n, \\r\\n or \\r and nothing else: text inside an event may hold any other
character that Python would take for the end of a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE_END = re.compile(rb"\r\n|\n|\r")
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r){2}")
"""An empty line; `?>`, as the halves of one \\r\\n are not two ends."""


class EventParser:
    """Give it what arrives; it yields the data of every event that is complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[str]:
        *events, self._rest = _EVENT_END.split(self._rest + piece)
        for event in events:
            # Comments (":..."), ids and event names say nothing that a client here needs.
            fields = (line.partition(b":") for line in _LINE_END.split(event))
            data = [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]
            if data:
                yield b"\n".join(data).decode()

    @property
    def is_between_events(self) -> bool:
        """Nothing has been received of an event that did not end."""
        return not self._rest.strip()
