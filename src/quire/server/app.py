"""create_app: routes, guards and error answers, put together around one Service."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

import quire
from quire.server.admin import admin_router
from quire.server.api import open_router, tokens_router, v1_router
from quire.server.config import ServerConfig
from quire.server.errors import ApiError, invalid
from quire.server.guards import BodyGuard, Boundary, Host
from quire.server.metrics import Metrics
from quire.server.openapi import described
from quire.server.outlining import tree_router
from quire.server.prompting import Prompting
from quire.server.service import Engine, Service
from quire.server.ui import ui_router


def create_app(engine: Engine, prompting: Prompting, config: ServerConfig) -> FastAPI:
    return app_of(Service(engine, prompting, config, Metrics()))


def app_of(service: Service, *, now: Callable[[], float] = time.time) -> FastAPI:
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
    app.include_router(tree_router(service))
    app.include_router(ui_router())
    guard(app, service, service.config)
    app.openapi = _openapi_of(app, service)  # type: ignore[method-assign]  # the way FastAPI documents
    return app


def guard(app: FastAPI, host: Host, config: ServerConfig) -> None:
    """Error answers in our format, and the guards around all of it."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _query_error)
    # The last added is the outermost.
    app.add_middleware(BodyGuard, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    app.add_middleware(Boundary, service=host)
    if host.tracer is not None:
        app.add_middleware(host.tracer.around)


def _openapi_of(app: FastAPI, service: Service) -> Callable[[], dict[str, Any]]:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = described(
                schema, service.names, service.config, service.info.vocab_size
            )
        return app.openapi_schema

    return openapi


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router says by itself: no such path, no such method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    headers = error.headers
    match error.status_code:
        case 404:
            message = f"there is no {what}: see /openapi.json for what there is"
        case 405:
            allowed = ", ".join(_methods(request))
            headers = {**(headers or {}), "Allow": allowed}
            message = f"{what} is not possible: use {allowed}"
        case _:
            message = str(error.detail)
    answer = ApiError(error.status_code, message, headers=headers)
    return answer.response()


def _methods(request: Request) -> list[str]:
    """All that its path can be asked with: the router tells only of the first route that it has."""
    found: set[str] = set()
    for path, operations in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", ".+", path), request.url.path):
            found |= {method.upper() for method in operations}
    return sorted(found)


async def _query_error(request: Request, error: Exception) -> Response:
    """A query parameter of the wrong type; bodies are read by bodies.py."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return invalid(param, f"{param}: {first['msg']}").response()
