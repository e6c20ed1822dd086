"""Fields that nobody knows: ignored, and named in the log once each.

Clients send fields of other servers, and newer ones of OpenAI's. Knows shapes, nothing of what they
mean. Bounded: names are a client's text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

from pydantic import BaseModel

MAX_NAMES = 256
MAX_NAME_CHARS = 80

logger = logging.getLogger("quire.server")


class UnknownFields(Protocol):
    def note(self, body: BaseModel) -> None: ...


class Unnamed:
    """For a look at a request that is not answered: whoever answers it names them."""

    def note(self, body: BaseModel) -> None:
        pass


class Warned:
    def __init__(self) -> None:
        self._warned: set[str] = set()

    def note(self, body: BaseModel) -> None:
        for name in extra_fields(body):
            if len(self._warned) >= MAX_NAMES:
                return
            shown = name[:MAX_NAME_CHARS]
            if shown in self._warned:
                continue
            self._warned.add(shown)
            logger.warning("field %r of a request is not known, and ignored", shown)
            if len(self._warned) == MAX_NAMES:
                logger.warning("more fields that are not known will not be named")


def extra_fields(body: BaseModel) -> Iterator[str]:
    """Names that the shape does not have, there and in what it holds."""
    yield from body.model_extra or ()
    for value in body.__dict__.values():
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, BaseModel):
                break  # lists hold one kind
            yield from extra_fields(each)
