"""RequestLog: one line for every answer, with `--log-requests`. Lengths and times, never a token.

Knows what is counted of one choice; not how it was asked for. Which request a choice is of comes
with the context that its tasks were made in: `serving` is set once per request, at the boundary.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

from quire.engine.messages import CachedTokens

logger = logging.getLogger("quire.requests")
serving: ContextVar[str] = ContextVar("serving", default="")
"""The id of the request that is being answered, as its client is told it."""

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


def log(answered: Answered, now_s: float) -> None:
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
