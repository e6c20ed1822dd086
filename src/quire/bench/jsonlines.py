"""Files of JSON lines, as recorded sessions and questions are kept. Knows no content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.errors import ConfigError


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file, with the numbers of their lines. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {str(path)!r} ({error}): give a file with a JSON object on each line"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise wrong_line(path, number, "is not JSON") from error
        if not isinstance(row, dict):
            raise wrong_line(path, number, "is no object")
        yield number, row


def wrong_line(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError(f"{path}, line {number} {problem}: correct it, or give another file")
