"""Answered: what is known of one choice when it ends, told to whoever wants to hear of all.

    a line in the log    with `--log-requests`
    a span               with `--otlp`; and one for each hand-over, which is counted in any case

Lengths and times, never a token. Knows what is counted of a choice, not how it was asked for. Which
request it is of comes with the context that its tasks were made in: see `serving`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.engine.messages import CachedTokens, Handed
from quire.web.guards import serving

if TYPE_CHECKING:
    from quire.server.metrics import Metrics
    from quire.web.traced import Tracer

logger = logging.getLogger("quire.requests")

TIERS = ("device", "host", "store", "peer", "prefill_device", "prefill_host", "prefill_store")


@dataclass(slots=True)
class Answered:
    """What is known of one choice when it ends, however it ends."""

    choice: int
    prompt_tokens: int
    began_s: float
    cached: CachedTokens | None = None
    first_s: float | None = None
    """When its first token came."""
    output_tokens: int = 0
    outcome: str = "aborted"


def log_answer(answered: Answered, now_s: float) -> None:
    cached = answered.cached or CachedTokens()
    by_tier = {tier: getattr(cached, tier) for tier in TIERS if getattr(cached, tier)}
    first_s, count = answered.first_s, answered.output_tokens
    seconds = now_s - answered.began_s
    rate = None
    if first_s is not None and count > 1 and now_s > first_s:
        rate = round((count - 1) / (now_s - first_s), 2)
    ttft_s = None if first_s is None else round(first_s - answered.began_s, 4)
    fields = {
        "request": serving.get(),
        "choice": answered.choice,
        "prompt_tokens": answered.prompt_tokens,
        "cached_tokens": cached.total,
        "cached_by_tier": by_tier,
        "output_tokens": count,
        "ttft_s": ttft_s,
        "tokens_per_s": rate,
        "seconds": round(seconds, 4),
        "outcome": answered.outcome,
    }
    found = ", ".join(f"{tier} {n:,}" for tier, n in by_tier.items()) or "nothing cached"
    first = "no token" if ttft_s is None else f"first token after {ttft_s:.3f} s"
    speed = "" if rate is None else f" at {rate:.1f}/s"
    logger.info(
        "%s %s: %s prompt tokens (%s), %s, %s out%s",
        fields["request"] or "a request",
        answered.outcome,
        f"{answered.prompt_tokens:,}",
        found,
        first,
        f"{count:,}",
        speed,
        extra={"fields": fields},
    )


def trace_answer(answered: Answered, tracer: Tracer, header: str) -> None:
    """`header`: as it was made for it."""
    cached = answered.cached or CachedTokens()
    found = {f"quire.cached_tokens.{tier}": getattr(cached, tier) for tier in TIERS}
    tracer.tell(
        header,
        "generate",
        began_s=answered.began_s,
        about={
            "gen_ai.usage.input_tokens": answered.prompt_tokens,
            "gen_ai.usage.output_tokens": answered.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached.total,
            "quire.choice": answered.choice,
            "quire.outcome": answered.outcome,
            **{name: count for name, count in found.items() if count},
        },
        moments={} if answered.first_s is None else {"first token": answered.first_s},
        error="" if answered.outcome in ("answered", "aborted") else answered.outcome,
    )


def tell_handover(handed: Handed, metrics: Metrics, tracer: Tracer | None) -> None:
    """A hand-over has ended."""
    metrics.handed_over(handed)
    if tracer is not None and handed.trace:
        trace_handover(handed, tracer)


def trace_handover(handed: Handed, tracer: Tracer) -> None:
    tracer.tell_of_others(
        handed.trace,
        "give pages" if handed.is_giver else "receive pages",
        is_asked=handed.is_giver,
        began_s=handed.began_s,
        ended_s=handed.ended_s,
        about={f"quire.handover.{name}": value for name, value in handed.about.items()},
    )
