"""`quire route`: one address in front of prefill and decode servers, or of unified ones."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from quire import logs
from quire.cli.extras import ROUTE, needs
from quire.cli.output import show, unset
from quire.garbage import spare_what_stands

if TYPE_CHECKING:
    from rich.table import Table

    from quire.router.fleet import Fleet

KEY_VARIABLE = "QUIRE_ADMIN_KEY"
API_KEY_VARIABLE = "QUIRE_API_KEY"
"""With it the router looks at clients' keys itself, and they go no further."""
SERVERS = "The servers (each option may be given several times, or with commas)"


def _servers(help: str, *names: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = unset(help, *names, metavar="URL", rich_help_panel=SERVERS)
    return option


def route(
    prefill: Annotated[list[str] | None, _servers("Servers with --role prefill.")] = None,
    decode: Annotated[list[str] | None, _servers("Servers with --role decode.")] = None,
    server: Annotated[
        list[str] | None, _servers("Servers that do everything themselves.", "--server")
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="To listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="To listen on; 0 for any that is free.")
    ] = 8000,
    retries: Annotated[int, typer.Option(min=0, help="Further servers to try when one fails.")] = 3,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Clients at one time; one more is told to come back.")
    ] = 4096,
    max_index_pages: Annotated[
        int,
        typer.Option(
            min=1, help="Cached pages of servers to remember; about 200 bytes each when known."
        ),
    ] = 2_000_000,
    admin_key_file: Annotated[
        Path | None,
        unset(
            f"Holds the servers' admin key; else {KEY_VARIABLE} does, or else each server on "
            "this machine has written its own.",
            metavar="FILE",
        ),
    ] = None,
    otlp: Annotated[
        str | None,
        unset("Send a span for every request to this OpenTelemetry collector.", metavar="URL"),
    ] = None,
) -> None:
    """Route requests to prefill and decode servers: by cached prefix and load, around failures."""
    needs("serve", ROUTE)
    from quire.router.config import RouterConfig, parse_urls
    from quire.router.run import route as run
    from quire.web.config import WebConfig
    from quire.web.keyfile import read_key

    if admin_key_file is not None:
        read_key(admin_key_file)  # what is wrong with it is said before anything is started
    config = RouterConfig(
        prefill=parse_urls(prefill or ()),
        decode=parse_urls(decode or ()),
        servers=parse_urls(server or ()),
        admin_key=None if admin_key_file else os.environ.get(KEY_VARIABLE) or None,
        admin_key_file=admin_key_file,
        retries=retries,
        max_index_pages=max_index_pages,
    )
    logs.configure(logging.WARNING)

    def ready(url: str, fleet: Fleet) -> None:
        spare_what_stands()
        if fleet.members:
            show(members(fleet))
        else:
            print(f"No server is named: start them with --router {url}")
        print(f"The router is ready at {url}\nOpenAI clients  base_url={url}/v1", flush=True)

    api_key = os.environ.get(API_KEY_VARIABLE) or None
    listen = WebConfig(
        host=host, port=port, api_key=api_key, otlp=otlp, max_connections=max_connections
    )
    asyncio.run(run(config, listen, ready))


def members(fleet: Fleet) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("server", "address", "state", "model"):
        table.add_column(name, overflow="fold")
    for member in fleet.members:
        state = f"{member.state}: {member.reason}" if member.reason else member.state.value
        table.add_row(member.side, escape(member.url), escape(state), escape(member.model))
    return table
