"""`quire top`: what a server or a router does, at a terminal. Asks /health and /metrics, as anybody
may, and with the admin key what requests there are and what is cached."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from quire.cli.extras import SERVE, needs
from quire.cli.output import show, unset
from quire.cli.route import KEY_VARIABLE
from quire.cli.toplines import shown
from quire.cli.toplooks import History, Look, read
from quire.errors import EngineError

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

EXAMPLE = "Example: [bold]quire top http://127.0.0.1:8000[/bold]"
_TIMEOUT_S = 5.0
_MOST_RUNS = 500
_GONE = 503
"""A server whose engine is gone, or a router without servers: the rest is asked all the same."""


def top(
    url: Annotated[str, typer.Argument(help="Of a server or a router.")] = "http://127.0.0.1:8000",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end.")] = False,
    admin_key_file: Annotated[
        Path | None,
        unset(
            f"Holds the server's admin key, for requests and the tree; else {KEY_VARIABLE} "
            "does, or else a server on this machine has written its own.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Show what a server does: tiers, hits, requests, store, hand-overs, the prefix tree."""
    needs("serve", SERVE)
    import httpx

    key = _key(url, admin_key_file)
    headers = {"cache-control": f"max-age={int(every)}"}  # one made for others will do
    headers |= {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, headers=headers) as client:
        history = History()
        picture = _picture(client, url, history)
        if once:
            show(picture)
        else:
            _follow(client, url, every, picture, history)


def _key(url: str, file: Path | None) -> str | None:
    """Raises ConfigError."""
    from quire.web.keyfile import find_key, read_key

    if file is not None:
        return read_key(file)
    try:
        return os.environ.get(KEY_VARIABLE) or find_key(url)
    except ValueError:  # no address at all: said when it is asked
        return None


def _follow(
    client: httpx.Client, url: str, every_s: float, first: RenderableType, history: History
) -> None:
    """Until Ctrl-C. A server that goes away is waited for."""
    from rich.live import Live

    with Live(first, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every_s)
                try:
                    picture = _picture(client, url, history)
                except EngineError as error:
                    picture = escape(f"{error}: asked again")
                live.update(picture, refresh=True)
        except KeyboardInterrupt:
            return


def _picture(client: httpx.Client, url: str, history: History) -> RenderableType:
    look = _look(client, url)
    history.take(look.metrics)
    return shown(url, look, history)


def _look(client: httpx.Client, url: str) -> Look:
    """Raises EngineError."""
    import httpx

    from quire.web.glances import AGE_HEADER

    base = url.rstrip("/")
    try:
        health = client.get(f"{base}/health")
        if health.status_code != _GONE:
            health.raise_for_status()
        told = health.json()
        members = told.get("members") if isinstance(told, dict) else None
        answer = client.get(f"{base}/metrics")
        answer.raise_for_status()
        metrics = read(answer.text, time.monotonic() - float(answer.headers.get(AGE_HEADER, 0)))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise EngineError(
            f"{url} does not answer ({type(error).__name__}): give the address of a server, such "
            "as http://127.0.0.1:8000"
        ) from None
    if members is not None:
        return Look(metrics, members)
    requests = _asked(client, f"{base}/admin/requests")
    return Look(
        metrics,
        requests=None if requests is None else requests["requests"],
        tree=_asked(client, f"{base}/admin/tree?limit={_MOST_RUNS}"),
    )


def _asked(client: httpx.Client, url: str) -> dict[str, Any] | None:
    """None: nobody may ask it here, or it has gone meanwhile."""
    import httpx

    if "authorization" not in client.headers:
        return None
    try:
        answer = client.get(url)
    except httpx.HTTPError:
        return None
    found: dict[str, Any] | None = answer.json() if answer.status_code == 200 else None
    return found
