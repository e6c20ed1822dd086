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


def message_of(line: str) -> str:
    """What a line of another process of ours says to a person."""
    if line.startswith("{"):
        try:
            found = json.loads(line)
        except ValueError:
            return line
        if isinstance(found, dict) and isinstance(found.get("message"), str):
            return str(found["message"])
    return line.removeprefix("quire: ")
