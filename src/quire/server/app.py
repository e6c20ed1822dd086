"""create_app: routes, guards and error answers, put together around one Service."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import quire
from quire.server.admin import admin_router
from quire.server.api import open_router, tokens_router, v1_router
from quire.server.config import ServerConfig
from quire.server.metrics import Metrics
from quire.server.openapi import described
from quire.server.service import EngineLike, Service
from quire.text.prompting import Prompting
from quire.web.guards import guard
from quire.web.ui import ui_router


def create_app(engine: EngineLike, prompting: Prompting, config: ServerConfig) -> FastAPI:
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
    app.include_router(ui_router())
    guard(app, service, service.config)
    app.openapi = _openapi_of(app, service)  # type: ignore[method-assign]  # the way FastAPI documents
    return app


def _openapi_of(app: FastAPI, service: Service) -> Callable[[], dict[str, Any]]:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = described(
                schema, service.names, service.config, service.info.vocab_size
            )
        return app.openapi_schema

    return openapi
