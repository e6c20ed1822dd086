"""The router's endpoints: /v1 is passed on, /health and /metrics are its own."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from starlette.requests import ClientDisconnect

import quire
from quire.router.membership import Membership
from quire.router.proxy import Proxy, pick_model, read_inquiry, read_question
from quire.router.upstream import Endpoint
from quire.web.config import WebConfig
from quire.web.errors import ApiError, client_closed
from quire.web.guards import guard, request_id_of
from quire.web.metrics import CONTENT_TYPE
from quire.web.routes import JOIN, LEAVE
from quire.web.security import check_key
from quire.web.sending import EventStream, unless_disconnected
from quire.web.ui import ui_router

_LARGE_BYTES = 256 * 1024
"""From here on reading a body takes milliseconds, and is done in a thread."""


def app_of(proxy: Proxy, config: WebConfig) -> FastAPI:
    app = FastAPI(
        title="Quire router",
        version=quire.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    metrics = proxy.metrics
    membership = Membership(proxy.fleet)
    is_vouched = config.api_key is not None

    async def door(request: Request) -> None:
        if config.api_key is not None:
            check_key(request.headers, config.api_key)

    keyed = [Depends(door)]

    @app.post("/v1/chat/completions", tags=["openai"], dependencies=keyed)
    async def chat_completions(request: Request) -> Response:
        return await generate(request, Endpoint.CHAT)

    @app.post("/v1/completions", tags=["openai"], dependencies=keyed)
    async def completions(request: Request) -> Response:
        return await generate(request, Endpoint.COMPLETIONS)

    @app.post("/v1/responses", tags=["openai"], dependencies=keyed)
    async def responses(request: Request) -> Response:
        return await generate(request, Endpoint.RESPONSES)

    @app.post("/tokenize", tags=["tokens"], dependencies=keyed)
    async def tokenize(request: Request) -> Response:
        return await generate(request, Endpoint.TOKENIZE)

    @app.post("/detokenize", tags=["tokens"], dependencies=keyed)
    async def detokenize(request: Request) -> Response:
        return await generate(request, Endpoint.DETOKENIZE)

    async def generate(request: Request, endpoint: Endpoint) -> Response:
        try:
            content = await request.body()
        except ClientDisconnect:
            raise client_closed() from None
        if len(content) < _LARGE_BYTES:
            inquiry = read_inquiry(endpoint, request.headers, content, is_vouched=is_vouched)
        else:
            inquiry = await asyncio.to_thread(
                read_inquiry, endpoint, request.headers, content, is_vouched=is_vouched
            )

        def unexpected(error: Exception) -> ApiError:
            return proxy.failed_unexpectedly(error, request_id_of(request.scope))

        if inquiry.is_stream:
            return EventStream(proxy.events(inquiry), metrics.aborts, unexpected)
        work = proxy.whole(inquiry)
        reply = await unless_disconnected(request.receive, work, metrics.aborts)
        return Response(reply.content, media_type="application/json")

    @app.get("/v1/models", tags=["openai"], dependencies=keyed)
    async def models(request: Request) -> Response:
        reply = await proxy.whole(read_question(request.headers, is_vouched=is_vouched))
        return Response(reply.content, media_type="application/json")

    @app.get("/v1/models/{model:path}", tags=["openai"], dependencies=keyed)
    async def one_model(model: str, request: Request) -> Response:
        question = read_question(request.headers, model, is_vouched=is_vouched)
        reply = pick_model(await proxy.whole(question), model)
        return Response(reply.content, media_type="application/json")

    @app.post(JOIN, tags=["servers"])
    async def join(request: Request) -> Response:
        """A server comes."""
        await membership.join(await request.body(), *_shown(request))
        return Response(b"{}", media_type="application/json")

    @app.post(LEAVE, tags=["servers"])
    async def leave(request: Request) -> Response:
        """A server goes."""
        await membership.leave(await request.body(), *_shown(request))
        return Response(b"{}", media_type="application/json")

    @app.get("/health", tags=["operation"])
    @app.get("/ready", tags=["operation"])
    async def health() -> Response:
        """Whether requests can be answered, and how every server is."""
        fleet = proxy.fleet
        is_well = bool(fleet.usable()) and not proxy.draining
        content = {
            "status": "ok" if is_well else "unavailable",
            "members": [member.as_dict() for member in fleet.members],
        }
        status = 200 if is_well else 503
        return Response(msgspec.json.encode(content), status, media_type="application/json")

    @app.get("/metrics", tags=["operation"])
    async def exposition() -> Response:
        """For Prometheus."""
        return Response(metrics.exposition(proxy.fleet), headers={"content-type": CONTENT_TYPE})

    app.include_router(ui_router())
    guard(app, proxy, config)
    return app


def _shown(request: Request) -> tuple[str | None, str]:
    """A server's key, and from where it comes."""
    return request.headers.get("authorization"), request.client.host if request.client else ""
