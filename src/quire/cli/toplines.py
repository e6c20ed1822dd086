"""What `quire top` shows, from one exposition of metrics or two. Pure: no sockets, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

_TIERS = ("device", "host", "store", "peer")
_WIDTH = 28


@dataclass(frozen=True, slots=True)
class MetricsRead:
    """One look: value by name and labels."""

    at_s: float
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def sum(self, name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(
            v
            for (n, found), v in self.values.items()
            if n == name and wanted <= dict(found).items()
        )

    def rows(self, name: str) -> list[tuple[dict[str, str], float]]:
        return [(dict(labels), v) for (n, labels), v in self.values.items() if n == name]


def read(text: str, at_s: float) -> MetricsRead:
    from prometheus_client.parser import text_string_to_metric_families

    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return MetricsRead(at_s, values)


def shown(url: str, before: MetricsRead | None, now: MetricsRead) -> RenderableType:
    """`before`: an earlier look, for rates; None: since the start."""
    from rich.console import Group

    return Group(
        f"[bold]{url}[/bold]   {now.sum('quire_running_requests'):.0f} running, "
        f"{now.sum('quire_waiting_requests'):.0f} waiting"
        + ("" if now.sum("quire_engine_up") else "   [red]THE ENGINE IS GONE[/red]"),
        "",
        _tiers(now),
        _found(before, now),
        _speeds(before, now),
        _store(now),
        *_handovers(now),
    )


def _tiers(now: MetricsRead) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("tier", "", "used", "of", "in use now"):
        table.add_column(name, no_wrap=True)
    for labels, size in now.rows("quire_tier_bytes"):
        if not size:
            continue
        used = now.sum("quire_tier_used_bytes", **labels)
        locked = now.sum("quire_tier_locked_bytes", **labels)
        full = round(_WIDTH * used / size)
        name = labels["tier"] + ("" if labels["component"] == "full" else f" {labels['component']}")
        bar = "█" * full + "░" * (_WIDTH - full)
        table.add_row(name, bar, *(format_bytes(int(each)) for each in (used, size, locked)))
    return table


def _found(before: MetricsRead | None, now: MetricsRead) -> str:
    prompt = _grown(before, now, "quire_prompt_tokens_total")
    parts = []
    for tier in _TIERS:
        count = _grown(before, now, "quire_cached_tokens_total", tier=tier)
        if tier != "peer":
            count += _grown(before, now, "quire_cached_tokens_total", tier=f"prefill_{tier}")
        parts.append(f"{tier} {100 * count / prompt:.0f} %" if prompt else f"{tier} –")
    since = "since the start" if before is None else "since the last look"
    return f"\nPrompt tokens {since}: {prompt:,.0f}, found on " + ", ".join(parts)


def _speeds(before: MetricsRead | None, now: MetricsRead) -> str:
    firsts = _grown(before, now, "quire_time_to_first_token_seconds_count")
    first_s = _grown(before, now, "quire_time_to_first_token_seconds_sum")
    said = _grown(before, now, "quire_generated_tokens_total")
    mean = f"{first_s / firsts:.3f} s" if firsts else "–"
    speed = "" if before is None else f" ({said / max(now.at_s - before.at_s, 1e-3):,.1f}/s)"
    return f"Time to first token, mean of {firsts:.0f}: {mean}. Tokens said: {said:,.0f}{speed}"


def _store(now: MetricsRead) -> str:
    if not now.sum("quire_store_attached"):
        return "Store: none"
    events = {labels["event"]: value for labels, value in now.rows("quire_store_events_total")}
    bad = [
        f"{name} {value:.0f}"
        for name, value in sorted(events.items())
        if value and name.split(":")[0] in ("error", "mismatch", "declined")
    ]
    health = "[red]does not answer[/red]" if events.get("breaker_is_open") else "answers"
    read_pages, written = events.get("read:ok", 0), events.get("written:ok", 0)
    trouble = "; " + ", ".join(bad) if bad else ""
    return f"Store: {health}, {read_pages:,.0f} pages read, {written:,.0f} written{trouble}"


def _handovers(now: MetricsRead) -> list[str]:
    if not now.rows("quire_handovers_total"):
        return []
    count = now.sum("quire_handovers_total")
    each = 1000 * now.sum("quire_handover_seconds_total") / count if count else 0.0
    opened = now.sum("quire_handovers_open")
    return [f"Hand-overs: {opened:.0f} open, {count:,.0f} received, {each:.0f} ms each"]


def _grown(before: MetricsRead | None, now: MetricsRead, name: str, **labels: str) -> float:
    """Since `before`; a server that has started anew counts from 0."""
    value = now.sum(name, **labels)
    earlier = 0.0 if before is None else before.sum(name, **labels)
    return value - earlier if value >= earlier else value
