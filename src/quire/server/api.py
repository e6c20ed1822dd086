"""All paths, and what each of /v1, of tokens and of the open endpoints does (see also admin.py)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse

import quire
from quire.engine.config import Role
from quire.server.admin import admin_router
from quire.server.answers import Answering, ChoicesAnswer
from quire.server.formats import ChatFormat, CompletionFormat
from quire.server.generation import StartedRun, run_chat, run_completion
from quire.server.incoming import Caller, prefill_of, read_body
from quire.server.openapi import STREAMED, describe_body, described
from quire.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quire.server.responses.answering import ResponseAnswer
from quire.server.responses.fields import ResponsesRequest
from quire.server.service import Service
from quire.web.errors import ApiError, engine_gone, shutting_down
from quire.web.glances import accepted_age_s
from quire.web.guards import guard, request_id_of
from quire.web.metrics import CONTENT_TYPE
from quire.web.routes import RouterNote, read_note
from quire.web.security import tenant_by_key
from quire.web.sending import EventStream, unless_disconnected
from quire.web.ui import ui_router


def app_of(service: Service, *, now: Callable[[], float] = time.time) -> FastAPI:
    """With guards and error answers around them."""
    app = FastAPI(
        title="Quire",
        version=quire.__version__,
        docs_url=None,  # the pages would load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(v1_router(service, now))
    app.include_router(tokens_router(service))
    app.include_router(open_router(service))
    app.include_router(admin_router(service))
    app.include_router(ui_router())
    guard(app, service, service.config)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = described(
                schema, service.names, service.config, service.info.vocab_size
            )
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the way FastAPI documents
    return app


def v1_router(service: Service, now: Callable[[], float]) -> APIRouter:
    started = int(now())
    vocabulary = service.prompting.vocabulary

    async def door(request: Request) -> None:
        note = _note(service, request, now)
        vouched = note is not None and note.vouches
        request.state.tenant = "" if vouched else _tenant(service, request)

    router = APIRouter(prefix="/v1", dependencies=[Depends(door)], tags=["openai"])

    @router.post("/chat/completions", openapi_extra=describe_body(ChatRequest), responses=STREAMED)
    async def chat_completions(request: Request) -> Response:
        caller = _caller(service, request, now)
        body = await read_body(request, ChatRequest, service.unknown)
        starting = run_chat(service, body, caller)
        answering = ChoicesAnswer.to(body, ChatFormat(vocabulary), service.info)
        return await _send(service, request, starting, answering, is_stream=body.stream)

    @router.post("/completions", openapi_extra=describe_body(CompletionRequest), responses=STREAMED)
    async def completions(request: Request) -> Response:
        caller = _caller(service, request, now)
        body = await read_body(request, CompletionRequest, service.unknown)
        starting = run_completion(service, body, caller)
        answering = ChoicesAnswer.to(body, CompletionFormat(vocabulary), service.info)
        return await _send(service, request, starting, answering, is_stream=body.stream)

    @router.post("/responses", openapi_extra=describe_body(ResponsesRequest), responses=STREAMED)
    async def responses(request: Request) -> Response:
        caller = _caller(service, request, now)
        body = await read_body(request, ResponsesRequest, service.unknown)
        answering = ResponseAnswer(body, service.responses, caller.tenant)
        starting = run_chat(service, answering.chat, caller)
        return await _send(service, request, starting, answering, is_stream=body.stream)

    @router.get("/models")
    async def models() -> Response:
        listed = [_model(service, name, started) for name in service.names]
        return _json({"object": "list", "data": listed})

    @router.get("/models/{model:path}")
    async def model(model: str) -> Response:
        service.check_name(model)
        return _json(_model(service, model, started))

    return router


def tokens_router(service: Service) -> APIRouter:
    """Text and token ids of each other, as vLLM's paths of these names."""

    async def door(request: Request) -> None:
        _tenant(service, request)

    router = APIRouter(dependencies=[Depends(door)], tags=["tokens"])

    @router.post("/tokenize", openapi_extra=describe_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """What a prompt or a chat is for the model."""
        body = await read_body(request, TokenizeRequest, service.unknown)
        if body.model is not None:
            service.check_name(body.model)
        if body.messages is not None:
            chat = body.conversation(body.messages)
            prompt = await service.prompting.of_chat(chat, service.info)
        else:
            bos = body.add_special_tokens is not False
            text = str(body.prompt)
            prompt = await service.prompting.of_text(text, service.info, bos=bos)
        label = service.prompting.vocabulary.label
        strings = [label(token) for token in prompt.ids] if body.return_token_strs else None
        return _json(
            {
                "count": prompt.num_tokens,
                "max_model_len": service.info.max_context,
                "tokens": prompt.ids,
                "token_strs": strings,
            }
        )

    @router.post("/detokenize", openapi_extra=describe_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special ones by their names."""
        body = await read_body(request, DetokenizeRequest, service.unknown)
        if body.model is not None:
            service.check_name(body.model)
        if not body.tokens:
            return _json({"prompt": ""})
        prompt = await service.prompting.of_ids(body.tokens, service.info, param="tokens")
        return _json({"prompt": await service.prompting.text_of(prompt, special=True)})

    return router


def open_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get("/health")
    async def health(request: Request) -> Response:
        """Whether server and engine live; what it is, and how busy."""
        if service.ailment is not None:
            raise engine_gone(service.ailment)
        return _json(
            {
                "status": "ok",
                "role": service.info.role,
                "model": service.info.name,
                "instance": service.instance,
                "draining": service.draining,
            }
            | await service.load(is_exact=not accepted_age_s(request.headers))
        )

    @router.get("/ready")
    async def ready() -> Response:
        """Whether requests are taken."""
        if service.ailment is not None:
            raise engine_gone(service.ailment)
        if service.draining:
            raise shutting_down()
        return _json({"status": "ok"})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """For Prometheus."""

        async def exposition() -> bytes:
            status = await service.fresh_status()
            is_up = service.engine.failure is None
            return service.metrics.exposition(status, is_up=is_up, info=service.info)

        return await service.shared.get(request, exposition, CONTENT_TYPE)

    return router


async def _send(
    service: Service,
    request: Request,
    starting: StartedRun,
    answering: Answering,
    *,
    is_stream: bool | None,
) -> Response:
    """Nothing is begun before the answer is; all is given up when the client goes away."""
    aborts = service.metrics.aborts
    if not is_stream:
        work = _whole(starting, answering)
        content = await unless_disconnected(request.receive, work, aborts)
        return Response(content, media_type="application/json")

    def unexpected(error: Exception) -> ApiError:
        return service.failed_unexpectedly(error, request_id_of(request.scope))

    events = _events(starting, answering)
    return EventStream(events, aborts, unexpected, waiting_s=service.config.waiting_s)


async def _whole(starting: StartedRun, answering: Answering) -> bytes:
    async with starting as running:
        answer = answering.whole(running)
        async for piece in running.pieces:
            answer.add(piece)
    return answer.encoded()


async def _events(starting: StartedRun, answering: Answering) -> AsyncGenerator[bytes, None]:
    """Closed early, it ends what is still computed."""
    async with starting as running:
        answer = answering.streamed(running)
        async for piece in running.pieces:
            for event in answer.tell(piece):
                yield event
    for event in answer.end():
        yield event


def _note(service: Service, request: Request, now: Callable[[], float]) -> RouterNote | None:
    return read_note(request.headers, service.config.admin_key, now())


def _tenant(service: Service, request: Request) -> str:
    config = service.config
    return tenant_by_key(request.headers, config.api_key, config.tenant_keys)


def _caller(service: Service, request: Request, now: Callable[[], float]) -> Caller:
    is_decode = service.info.role == Role.DECODE
    note = _note(service, request, now)
    status = service.engine.status
    handover = status.handover if status is not None else None
    known = list(handover.transports) if handover is not None else []
    prefill = prefill_of(request.headers, note, is_decode=is_decode, known=known)
    return Caller(request.state.tenant, prefill)


def _model(service: Service, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "max_model_len": service.info.max_context,
    }


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
