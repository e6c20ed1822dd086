"""`quire serve`: find the model, start an engine and a server on it, and say where it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quire import logs
from quire.cli import flags
from quire.cli.extras import SERVE, needs
from quire.cli.output import complain, show, start_bar
from quire.cli.welcome import directions, tiers
from quire.errors import StoreError
from quire.garbage import spare_what_stands
from quire.settings import (
    Machine,
    Settings,
    check,
    effective,
    engine_config,
    make_cache_dir,
    probe,
    served_name,
)
from quire.settings.values import NONE

if TYPE_CHECKING:
    from quire.engine.messages import EngineInfo
    from quire.server.config import ServerConfig


@flags.taking()
def serve(
    given: flags.Given,
    child: flags.IsChild = False,
) -> None:
    """Serve a model over an OpenAI-compatible API, with all tiers of the cache."""
    loaded = given.loaded()
    needs("serve", SERVE)
    if child:
        from quire.own_server import end_with_standard_input

        end_with_standard_input()
    machine = probe()
    settings = effective(loaded.settings, machine)
    for warning in check(loaded, settings, machine):
        complain(warning)
    if loaded.settings.store is None:
        make_cache_dir(machine)
    code = _serve(settings, machine, is_child=child)
    if code:
        raise typer.Exit(code)


def server_config(settings: Settings) -> ServerConfig:
    from quire.server.config import ServerConfig
    from quire.web.keyfile import make_key
    from quire.web.security import read_tenants

    return ServerConfig(
        host=settings.host,
        port=settings.port,
        api_key=settings.api_key,
        tenant_keys=read_tenants(Path(settings.tenant_keys).expanduser())
        if settings.tenant_keys
        else {},
        admin_key=settings.admin_key or make_key(),
        request_timeout_s=settings.request_timeout,
        engine_silence_s=settings.engine_silence,
        drain_timeout_s=settings.drain_timeout,
        routers=tuple(each.strip() for each in (settings.router or "").split(",") if each),
        strict=settings.strict,
        tenant_requests=settings.tenant_requests,
        served_names=settings.served_model_name or (),
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        use_model_defaults=settings.sampling_defaults == "model",
        log_requests=settings.log_requests,
        otlp=settings.otlp,
        record=Path(settings.record).expanduser() if settings.record else None,
        record_max_bytes=settings.record_max,
    )


def _serve(settings: Settings, machine: Machine, *, is_child: bool) -> int:
    from quire.models import resolve
    from quire.own_server import announce
    from quire.server.run import serve as run_server
    from quire.web.listening import bind

    logs.configure(logging.WARNING)
    server = server_config(settings)
    bind(server).close()  # a port in use is said before a model is converted for nothing
    check_store(settings)
    with contextlib.ExitStack() as living, contextlib.ExitStack() as starting:
        progress = starting.enter_context(start_bar())
        directory = resolve(settings.model, progress)
        names = settings.served_model_name or (served_name(settings.model),)
        engine = engine_config(settings, machine, directory, names[0])

        def ready(url: str, info: EngineInfo) -> None:
            starting.close()
            spare_what_stands()
            assert server.admin_key is not None
            key_file = keep_admin_key(url, server.admin_key, settings, living)
            if is_child:
                announce(url, info)
                return
            show(tiers(info, settings))
            print(directions(url, info, settings, key_file), flush=True)

        return asyncio.run(run_server(engine, server, on_ready=ready, on_progress=progress))


def check_store(settings: Settings) -> None:
    """A store that cannot be used is said before a model is loaded for nothing. Raises
    StoreError."""
    from quire.store import check_pages

    if settings.store not in (None, NONE):
        try:
            check_pages(settings.store)
        except StoreError as error:
            raise type(error)(f"store: {error}") from None


def keep_admin_key(
    url: str, key: str, settings: Settings, living: contextlib.ExitStack
) -> Path | None:
    """Where a key that was made for the server can be read, as long as it lives; None if it was
    given, or cannot be written down."""
    from quire.web.keyfile import kept, place_of

    if settings.admin_key is not None:
        return None
    named = settings.admin_key_file
    file = Path(named).expanduser().absolute() if named else place_of(url)
    try:
        living.enter_context(kept(key, file))
    except OSError as error:
        complain(
            f"the admin key cannot be written to {str(file)!r} ({error.strerror}), so nobody can "
            "use /admin: set admin_key, or set admin_key_file to a file that this user can write"
        )
        return None
    return file
