"""watched(): while the server serves, what its engine reports is looked at, and said if need be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from quire.server.notices import Notices
from quire.server.service import Service

logger = logging.getLogger("quire.events")
_LOOK_EVERY_S = 1.0
"""Reports come twice a second."""


@contextlib.asynccontextmanager
async def watched(service: Service) -> AsyncIterator[None]:
    watching = asyncio.create_task(_watch(service), name="quire-watch")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(service: Service) -> None:
    notices = Notices()
    while True:
        status = service.engine.status
        if status is not None:
            for notice in notices.look(status, service.clock()):
                level = logging.INFO if notice.is_good else logging.WARNING
                logger.log(level, "%s", notice.text, extra={"fields": notice.fields})
        await asyncio.sleep(_LOOK_EVERY_S)
