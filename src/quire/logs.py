"""How Quire's processes write their log: for a person at a terminal, else one JSON object per line.

    quire: req-1 answered: 1,024 tokens …          at a terminal
    {"time": …, "level": "info", "logger": "quire.requests", "message": …, "ttft_s": …}

What belongs to a line beside its sentence is given as `extra={"fields": {…}}`. Knows the standard
library's logging, nothing of what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}), ensure_ascii=False)


def configure(level: int, stream: TextIO | None = None) -> None:
    """For the process; `stream` is standard error if not told. What requests and events say of
    themselves (quire.requests, quire.events) is shown whatever the level of the rest."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        logging.Formatter("quire: %(message)s") if stream.isatty() else JsonLines()
    )
    logging.basicConfig(level=level, handlers=[handler])
    for name in ("quire.requests", "quire.events"):
        logging.getLogger(name).setLevel(logging.INFO)


def relay(server: str, line: str, stream: TextIO | None = None) -> None:
    """A line of the log of a server that we started becomes one of ours: whose it is stands before
    it for a person, else in a field."""
    stream = stream or sys.stderr
    if stream.isatty():
        stream.write(f"quire: [{server}] {message_of(line)}\n")
    else:
        told = _read(line) or {"message": message_of(line)}
        stream.write(json.dumps(told | {"server": server}, ensure_ascii=False) + "\n")
    stream.flush()


def message_of(line: str) -> str:
    """What a line of another process of ours says to a person."""
    found = (_read(line) or {}).get("message")
    return found if isinstance(found, str) else line.removeprefix("quire: ")


def _read(line: str) -> dict[str, object] | None:
    """None: it is no line of JSON."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
