"""What `quire serve` says when it is ready: where to point a client, and what each tier holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from quire.errors import ConfigError, StoreError
from quire.settings import OPTIONS, Settings
from quire.sizes import format_bytes, parse_size
from quire.store.url import split_urls

if TYPE_CHECKING:
    from pathlib import Path

    from quire.engine.messages import EngineInfo


def directions(url: str, info: EngineInfo, settings: Settings, key_file: Path | None) -> str:
    """Lines to be printed as they are: what is in them is copied to another terminal."""
    key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if settings.api_key else ""
    ranks = f", {info.tp} ranks" if info.tp > 1 else ""
    body = f'{{"model": "{info.name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    lines = [
        f"{info.name} is ready at {url}",
        *([f"REUSE IS OFF    {info.no_reuse}"] if info.no_reuse else []),
        f"{info.dtype} on {info.device}{ranks}, up to {info.max_context:,} tokens per request",
        f"Computed by {_decoder(info)}",
        "",
        *([f"Store           {OPTIONS['store'].show(info.store)}"] if info.store else []),
        f"OpenAI clients  base_url={url}/v1",
        f"Try it          curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{body}'",
        f"Look at it      {url}/ui, or: quire top {url}",
        *([f"Admin key       {key_file}"] if key_file else []),
        "Stop it         Ctrl-C",
    ]
    return "\n".join(lines)


def tiers(info: EngineInfo, settings: Settings) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="What the cache can hold")
    table.add_column("tier", no_wrap=True)
    for name in ("size", "pages", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    by_name = {tier.name: tier for tier in info.tiers if tier.component == "full"}
    others = [tier for tier in info.tiers if tier.component != "full" and tier.num_pages]
    page_bytes = max((tier.page_bytes for tier in by_name.values()), default=0)
    notes = {
        "device": f"{info.device}, {info.page_size} tokens per page",
        "host": f"filled by {settings.write_policy.value}",
    }
    for label, name in (("L1 device", "device"), ("L2 host", "host")):
        tier = by_name.get(name)
        if tier is None or not tier.num_pages:
            table.add_row(label, "off", "", "", "")
        else:
            size = tier.num_pages * tier.page_bytes
            table.add_row(label, *_amounts(size, tier.num_pages, info.page_size), notes[name])
        for other in others:
            if other.name == name:
                amount = format_bytes(other.num_pages * other.page_bytes)
                what = "snapshots" if other.component == "recurrent" else "windows"
                table.add_row("", amount, f"{other.num_pages:,}", "", what)
    if not info.store:
        table.add_row("L3 store", "off", "", "", "")
    else:
        note = f"awaited by {settings.prefetch_policy.value}"
        size_bytes = store_bytes(info.store)
        if size_bytes is None or not page_bytes:
            table.add_row("L3 store", "unlimited here", "", "", note)
        else:
            pages = size_bytes // page_bytes
            table.add_row("L3 store", *_amounts(size_bytes, pages, info.page_size), note)
    return table


def _decoder(info: EngineInfo) -> str:
    """What computes the model, and why not our own if nobody asked for another."""
    if info.forward == "dense":
        return "Quire's own decoder"
    return f"transformers: {info.no_dense}" if info.no_dense else "transformers"


def store_bytes(url: str) -> int | None:
    """The store's budget, where the URL says it; of several, that of all together."""
    try:
        return sum(parse_size(each.options["max"]) for each in split_urls(url))
    except (KeyError, ConfigError, StoreError):
        return None


def _amounts(size_bytes: int, num_pages: int, page_size: int) -> tuple[str, str, str]:
    return format_bytes(size_bytes), f"{num_pages:,}", f"{num_pages * page_size:,}"
