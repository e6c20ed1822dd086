"""The usage object of an answer: tokens of prompt and answer, and where the prompt was found.

cached_tokens                all that were not computed: the sum of the others
cached_tokens_by_tier        found by this server: in its tiers, or at a peer
cached_tokens_at_prefill     found by the prefill server, in its tiers, and handed over
store_hit_tokens             what this server's store had, beyond device and host, used or not
accepted_prediction_tokens   of the answer: proposed ahead, and what the model would have said
rejected_prediction_tokens   proposed ahead, and thrown away: not part of the answer
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.engine.messages import CachedTokens


@dataclass(slots=True)
class Usage:
    """Counts as an answer grows. A prompt is counted once, however many choices it has."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    cached: list[CachedTokens] = field(default_factory=list)
    """Of the first choice of each prompt: the others share its pages."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.num_accepted_tokens,
                "rejected_prediction_tokens": self.num_rejected_tokens,
            },
            "prompt_tokens_details": cached_to_dict(self.cached)
            | {
                "cached_tokens_at_prefill": {
                    "device": sum(each.prefill_device for each in self.cached),
                    "host": sum(each.prefill_host for each in self.cached),
                    "store": sum(each.prefill_store for each in self.cached),
                }
            },
        }


def cached_to_dict(cached: list[CachedTokens]) -> dict[str, Any]:
    return {
        "cached_tokens": sum(each.total for each in cached),
        "cached_tokens_by_tier": {
            "device": sum(each.device for each in cached),
            "host": sum(each.host for each in cached),
            "store": sum(each.store for each in cached),
            "peer": sum(each.peer for each in cached),
        },
        "store_hit_tokens": sum(each.store + each.store_left for each in cached),
    }
