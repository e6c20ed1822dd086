"""What `quire top` saw of a server, look by look, and what follows from two looks. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TIERS = ("device", "host", "store", "peer")
_KEPT = 60
_FEW_TOKENS = 32
"""Fewer say nothing of how fast prompts are computed."""


@dataclass(frozen=True, slots=True)
class MetricsRead:
    """One exposition: value by name and labels."""

    at_s: float
    values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

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


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found. What needs the admin key is None without it."""

    metrics: MetricsRead
    members: Sequence[Mapping[str, Any]] | None = None
    """Of a router, its servers."""
    requests: Sequence[Mapping[str, Any]] | None = None
    tree: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two looks, or up to the first."""

    seconds: float
    prompt: float
    """Tokens of prompts, and by tier those that were found."""
    found: dict[str, float]
    said: float
    firsts: float
    """Answers that began, and the mean time to their first token."""
    first_s: float
    computed: float
    model_s: float
    """Less what saying took."""

    @property
    def speed(self) -> float:
        """Prompt tokens per second computed; 0: too few to tell."""
        return self.computed / self.model_s if self.computed > _FEW_TOKENS else 0.0

    def without_s(self, speed: float) -> float:
        """Time to the first token if what was found had been computed: an estimate."""
        spared = sum(self.found.values()) / self.firsts
        return self.first_s + spared / speed


@dataclass(slots=True)
class History:
    """The last looks. One that follows a new start of the server counts from nothing."""

    intervals: deque[Interval] = field(default_factory=lambda: deque(maxlen=_KEPT))
    last: Interval = field(init=False)
    speed: float = 0.0
    """The best that was seen: so what the cache spares is rather understated."""
    _before: MetricsRead | None = None

    def take(self, now: MetricsRead) -> None:
        self.last = interval = _between(self._before, now)
        if self._before is not None:
            self.intervals.append(interval)
        self._before = now
        self.speed = max(self.speed, interval.speed)


def _between(before: MetricsRead | None, now: MetricsRead) -> Interval:
    seconds = 1.0 if before is None else max(now.at_s - before.at_s, 1e-3)
    found = {tier: _grown(before, now, "quire_cached_tokens_total", tier=tier) for tier in TIERS}
    for tier in ("device", "host", "store"):
        found[tier] += _grown(before, now, "quire_cached_tokens_total", tier=f"prefill_{tier}")
    firsts = _grown(before, now, "quire_time_to_first_token_seconds_count")
    first_s = _grown(before, now, "quire_time_to_first_token_seconds_sum")
    said = _grown(before, now, "quire_generated_tokens_total")
    events = "quire_engine_events_total"
    computed = _grown(before, now, events, event="computed_prompt_tokens")
    model_s = _grown(before, now, "quire_engine_seconds_total", what="model")
    gaps = now.sum("quire_time_per_output_token_seconds_count")
    gap_s = now.sum("quire_time_per_output_token_seconds_sum")
    saying_s = said * gap_s / gaps if gaps else 0.0
    return Interval(
        seconds=seconds,
        prompt=_grown(before, now, "quire_prompt_tokens_total"),
        found=found,
        said=said,
        firsts=firsts,
        first_s=first_s / firsts if firsts else 0.0,
        computed=computed,
        model_s=max(model_s - saying_s, model_s / 10, 5e-3),
    )


def _grown(before: MetricsRead | None, now: MetricsRead, name: str, **labels: str) -> float:
    """Since `before`; a server that has started anew counts from 0."""
    value = now.sum(name, **labels)
    earlier = 0.0 if before is None else before.sum(name, **labels)
    return value - earlier if value >= earlier else value
