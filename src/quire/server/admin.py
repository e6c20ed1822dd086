"""/admin: looking into server and cache, flushing it, changing its store, warming it up; and what a
router asks: what this server is, what has come and gone, and the page keys of a prompt.

Each path is behind one of two doors: security.check_admin, or check_router for what a router asks.
What the engine refuses is an answer with the engine's sentence, less any credentials.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from quire.engine.messages import (
    Attach,
    Detach,
    EngineStatus,
    Event,
    Events,
    Flush,
    Flushed,
    GetEvents,
    GetKeys,
    GetOutline,
    GetRequests,
    GetStatus,
    GetTenants,
    Keys,
    Outline,
    OutlineRun,
    Question,
    Requests,
    StoreStatus,
    Tenants,
    Warm,
    Warmed,
)
from quire.errors import EngineError, StoreURLError
from quire.server.answers import cached_to_dict
from quire.server.incoming import Caller, Unnamed, read_body
from quire.server.openapi import describe_body
from quire.server.requests import (
    FlushRequest,
    KeysRequest,
    PrefetchRequest,
    StoreRequest,
)
from quire.server.service import Service
from quire.store.url import redact, split_urls
from quire.text.prompting import Prompt
from quire.types import PAGE_KEY_BYTES, TENANT_MARK
from quire.web.errors import ApiError, engine_gone, invalid, timed_out
from quire.web.routes import CLIENT_HEADER
from quire.web.security import check_admin, check_router, tenant_by_key

STATUS_TIMEOUT_S = 30.0
CHANGE_TIMEOUT_S = 300.0
"""Clearing a large store takes a while."""

MAX_RUNS = 10_000

JSON = "application/json"

Result = TypeVar("Result")


def admin_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/admin", tags=["admin"])
    router.include_router(_for_routers(service))
    router.include_router(_for_admins(service))
    return router


def _for_routers(service: Service) -> APIRouter:
    async def door(request: Request) -> None:
        check_router(request.headers, service.config.admin_key)

    router = APIRouter(dependencies=[Depends(door)])

    @router.get("/info")
    async def get_info() -> Response:
        """What this server is: for a router."""
        info = service.info
        return _json(
            {
                "role": info.role,
                "peer": info.peer,
                "model": info.name,
                "fingerprint": info.fingerprint,
                "page_size": info.page_size,
                "max_context": info.max_context,
                "tp": info.tp,
                "instance": service.instance,
            }
            | await service.load()
        )

    @router.get("/events")
    async def get_events(
        since: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
        cursor: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    ) -> Response:
        """What has come into the tiers and gone from them after event number `since`; with a
        `cursor`, more of what is present."""
        found = await _ask(service, GetEvents(since, cursor), Events, STATUS_TIMEOUT_S)
        return _json({"instance": service.instance} | told_events(found))

    @router.post("/keys", openapi_extra=describe_body(KeysRequest))
    async def keys(request: Request) -> Response:
        """The page keys of a request's prompt. Computes hashes, nothing else."""
        body = await read_body(request, KeysRequest, Unnamed())
        prompt = await _prompt(service, body, body.first_prompt)
        question = GetKeys(prompt.tokens, _client(service, request).salt(body.cache_salt))
        found = await _ask(service, question, Keys, STATUS_TIMEOUT_S)
        return _json(
            {
                "page_size": found.page_size,
                "num_tokens": found.num_tokens,
                "keys": _hex(found.keys),
            }
        )

    return router


def _for_admins(service: Service) -> APIRouter:
    async def door(request: Request) -> None:
        check_admin(request.headers, service.config.admin_key)

    router = APIRouter(dependencies=[Depends(door)])

    @router.post("/drain")
    async def drain() -> Response:
        """Take no more requests, nor prompts of other engines; how much is left to finish. For
        good: what is drained is then stopped."""
        return await _drain(service)

    @router.get("/requests")
    async def get_requests(request: Request) -> Response:
        """Every request in flight, and where it stands."""

        async def found() -> bytes:
            found = await _ask(service, GetRequests(), Requests, STATUS_TIMEOUT_S)
            return msgspec.json.encode({"requests": found.requests})

        return await service.shared.get(request, found, JSON)

    @router.get("/tenants")
    async def get_tenants() -> Response:
        """Those who asked last, by key or `cache_salt`: what they have in flight and in the
        cache."""
        found = await _ask(service, GetTenants(), Tenants, STATUS_TIMEOUT_S)
        return _json(_tenants(service, found))

    @router.get("/cache")
    async def get_cache(check: bool = False) -> Response:
        """Tiers, queues, operations and counters. `check` verifies every invariant first."""
        status = await _ask(
            service, GetStatus(check), EngineStatus, STATUS_TIMEOUT_S, refusal=500 if check else 409
        )
        return _json(_shown(status) | {"checked": check})

    @router.post("/cache/flush", openapi_extra=describe_body(FlushRequest))
    async def flush(request: Request) -> Response:
        """Evict all that nobody uses from some tiers. `left_alone`: stores that are only read."""
        body = await read_body(request, FlushRequest)
        tiers = list(dict.fromkeys(body.tiers))
        flushed = await _ask(service, Flush(list(tiers)), Flushed, CHANGE_TIMEOUT_S)
        left_alone = {"left_alone": flushed.left_alone} if flushed.left_alone else {}
        return _json({"pages": flushed.pages} | left_alone)

    @router.post("/cache/prefetch", openapi_extra=describe_body(PrefetchRequest))
    async def prefetch(request: Request) -> Response:
        """Bring a prompt's pages from the store to the host."""
        body = await read_body(request, PrefetchRequest, service.unknown)
        prompt = await _prompt(service, body, body.prompt)
        question = Warm(prompt.tokens, body.cache_salt or "")
        warmed = await _ask(service, question, Warmed, CHANGE_TIMEOUT_S)
        return _json({"prompt_tokens": warmed.prompt_tokens} | cached_to_dict([warmed.cached]))

    _add_store(router, service)
    _add_tree(router, service)
    return router


def _add_store(router: APIRouter, service: Service) -> None:
    @router.get("/store")
    async def get_store() -> Response:
        """The attached store, and what its client counted."""
        status = await _ask(service, GetStatus(), EngineStatus, STATUS_TIMEOUT_S)
        return _json(_shown(status.store))

    @router.put("/store", openapi_extra=describe_body(StoreRequest))
    async def put_store(request: Request) -> Response:
        """Attach a store, in place of the one there is."""
        url = (await read_body(request, StoreRequest)).url
        try:
            split_urls(url)
        except StoreURLError as error:
            raise invalid("url", redact(str(error)), code="invalid_store_url") from None
        return _json(_shown(await _ask(service, Attach(url), StoreStatus, CHANGE_TIMEOUT_S)))

    @router.delete("/store")
    async def delete_store() -> Response:
        """Detach the store."""
        return _json(_shown(await _ask(service, Detach(), StoreStatus, CHANGE_TIMEOUT_S)))


def _add_tree(router: APIRouter, service: Service) -> None:
    @router.get("/tree")
    async def get_tree(
        request: Request, limit: Annotated[int, Query(ge=1, le=MAX_RUNS)] = 2000
    ) -> Response:
        """The prefix tree: runs of pages, where they are and how warm."""

        async def drawn() -> bytes:
            found = await _ask(service, GetOutline(limit), Outline, STATUS_TIMEOUT_S)
            fields = list(OutlineRun.__struct_fields__)
            about = {"fields": fields, "page_size": service.info.page_size}
            return msgspec.json.encode(about | {"runs": found.runs})

        return await service.shared.get(request, drawn, JSON)


async def _drain(service: Service) -> Response:
    try:
        return _json({"draining": True} | await service.begin_draining())
    except EngineError as error:
        raise engine_gone(str(error)) from None


async def _ask(
    service: Service,
    question: Question,
    answer: type[Result],
    timeout_s: float,
    *,
    refusal: int = 409,
) -> Result:
    """Raises ApiError: 503 without an engine, 504 without an answer, `refusal` when it says no."""
    try:
        async with asyncio.timeout(timeout_s):
            return await service.engine.ask(question, answer, timeout_s=timeout_s * 2)
    except TimeoutError:
        raise timed_out(f"the engine did not answer within {timeout_s:g} s") from None
    except EngineError as error:
        if service.engine.failure is not None:
            raise engine_gone(service.engine.failure) from None
        raise ApiError(refusal, redact(str(error)), code="engine_refused") from None


async def _prompt(
    service: Service, body: KeysRequest | PrefetchRequest, prompt: str | list[int] | None
) -> Prompt:
    if body.messages is not None:
        conversation = body.conversation(body.messages)
        return await service.prompting.of_chat(conversation, service.info)
    if isinstance(prompt, str):
        return await service.prompting.of_text(prompt, service.info)
    assert prompt is not None  # one of the two is there: requests.py saw to it
    return await service.prompting.of_ids(prompt, service.info)


def _client(service: Service, request: Request) -> Caller:
    """For whom a router asks. Who has no tenant's key has no tenant: whether it may ask at all is
    seen when it does."""
    given, tenants = request.headers.get(CLIENT_HEADER), service.config.tenant_keys
    if given is None or not tenants:
        return Caller()
    try:
        return Caller(tenant_by_key({"authorization": given}, None, tenants))
    except ApiError:
        return Caller()


def _tenants(service: Service, found: Tenants) -> dict[str, Any]:
    tiers = {tier.name: tier.page_bytes for tier in service.info.tiers if tier.component == "full"}
    device, host = tiers.get("device", 0), tiers.get("host", 0)
    return {
        "tenants": [
            {
                # One of the two; empty: those with neither.
                "cache_salt": None if each.name.endswith(TENANT_MARK) else each.name,
                "tenant": each.name.removesuffix(TENANT_MARK),
                "running": each.running,
                "waiting": each.waiting,
                "device_bytes": each.device_pages * device,
                "host_bytes": each.host_pages * host,
                "store_written_bytes": each.written_pages * host,
                "store_refused_bytes": each.refused_pages * host,
            }
            for each in found.tenants
        ],
        "quota": {
            "device_bytes": found.device_quota_pages * device,
            "host_bytes": found.host_quota_pages * host,
            "store_share": found.share,
            "requests": service.config.tenant_requests or None,
        },
    }


def told_events(found: Events) -> dict[str, Any]:
    return {
        "last": found.last,
        "complete": found.complete,
        "more": found.more,
        "cursor": found.cursor,
        "events": [_event(event) for event in found.events],
    }


def _event(event: Event) -> dict[str, Any]:
    return {"kind": event.kind, "tier": event.tier, "keys": _hex(event.keys)}


def _hex(keys: bytes) -> list[str]:
    return [keys[i : i + PAGE_KEY_BYTES].hex() for i in range(0, len(keys), PAGE_KEY_BYTES)]


def _shown(status: EngineStatus | StoreStatus) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(status)
    store = shown.get("store", shown)
    store["url"] = redact(store["url"])
    return shown


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)
