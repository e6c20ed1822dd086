"""`quire top`: what a server does, at a terminal. Asks its /metrics, as Prometheus does; no key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.extras import SERVE, needs
from quire.cli.output import show
from quire.cli.toplines import MetricsRead, read, shown
from quire.errors import EngineError

if TYPE_CHECKING:
    from rich.console import RenderableType

EXAMPLE = "Example: [bold]quire top http://127.0.0.1:8000[/bold]"
_TIMEOUT_S = 5.0


def top(
    url: Annotated[str, typer.Argument(help="Of a server.")] = "http://127.0.0.1:8000",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end.")] = False,
) -> None:
    """Show what a server does: tiers, hits, requests, store, hand-overs."""
    needs("serve", SERVE)
    first = _look(url)
    if once:
        show(shown(url, None, first))
        return
    _follow(url, every, first)


def _follow(url: str, every_s: float, before: MetricsRead) -> None:
    """Until Ctrl-C. A server that goes away is waited for."""
    from rich.live import Live

    with Live(shown(url, None, before), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every_s)
                picture: RenderableType
                try:
                    now = _look(url)
                except EngineError as error:
                    picture = f"{error}: asked again"
                else:
                    picture, before = shown(url, before, now), now
                live.update(picture, refresh=True)
        except KeyboardInterrupt:
            return


def _look(url: str) -> MetricsRead:
    """Raises EngineError."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/metrics", timeout=_TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(
            f"{url} does not answer ({type(error).__name__}): give the address of a server, such "
            "as http://127.0.0.1:8000"
        ) from None
    return read(answer.text, time.monotonic())
