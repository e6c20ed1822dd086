"""GET /admin/tree: the prefix tree for a person to look at. Runs of pages, no tokens."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from quire.engine.messages import GetOutline, Outline, OutlineRun
from quire.errors import EngineError
from quire.server.service import Service
from quire.web.errors import engine_gone
from quire.web.security import check_admin

MAX_RUNS = 10_000
_TIMEOUT_S = 30.0


def tree_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/tree")
    async def get_tree(
        request: Request, limit: Annotated[int, Query(ge=1, le=MAX_RUNS)] = 2000
    ) -> Response:
        """The prefix tree: runs of pages, where they are and how warm."""
        check_admin(request.headers, service.config.admin_key)
        try:
            found = await service.engine.ask(GetOutline(limit), Outline, timeout_s=_TIMEOUT_S)
        except EngineError as error:
            raise engine_gone(str(error)) from None
        answer = {
            "fields": list(OutlineRun.__struct_fields__),
            "page_size": service.info.page_size,
            "runs": msgspec.to_builtins(found.runs),
        }
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router
