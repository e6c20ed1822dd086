"""Answers that many ask for at about the same time, made once.

Who says that an older one will do (`Cache-Control: max-age=1`, as /ui and `quire top` say) is given
the one made last, or being made, if it is no older; everybody else a new one. So ten pages that
look at a server cost what one costs. How old an answer is stands in its head, to the millisecond,
for whoever reckons a rate from two. Knows HTTP; not what is answered.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from fastapi import Request, Response

AGE_HEADER = "x-quire-age"
"""Seconds since what the answer says was looked up."""
_MAX_AGE = re.compile(r"(?:^|[,\s])max-age=(\d{1,6})(?:$|[,\s])", re.IGNORECASE)

Make = Callable[[], Awaitable[bytes]]


def accepted_age_s(headers: Mapping[str, str]) -> int:
    """How old an answer may be; 0: it is to be new."""
    found = _MAX_AGE.search(headers.get("cache-control", ""))
    return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class _Made:
    query: bytes
    began_s: float
    body: asyncio.Future[bytes]

    @property
    def has_failed(self) -> bool:
        return self.body.done() and (self.body.cancelled() or self.body.exception() is not None)


class SharedAnswers:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, _Made] = {}
        """By path."""

    async def get(self, request: Request, make: Make, media_type: str) -> Response:
        """What `make` says of this path and query. Raises what it raises."""
        # As its route was found by: of request.url clients choose a part, the host.
        path, query, now = request.scope["path"], request.scope["query_string"], self._clock()
        made = self._last.get(path)
        is_new = made is not None and now - made.began_s < accepted_age_s(request.headers)
        if made is None or not is_new or made.query != query or made.has_failed:
            made = self._last[path] = _Made(query, now, asyncio.ensure_future(make()))
        # Who goes away meanwhile takes it from nobody.
        body = await asyncio.shield(made.body)
        age_s = self._clock() - made.began_s
        return Response(body, media_type=media_type, headers={AGE_HEADER: f"{age_s:.3f}"})
