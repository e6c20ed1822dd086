"""What the scheduler counts: every request ends under one of these names."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Requests, counted since the start."""

    arrived: int = 0
    admitted: int = 0
    finished: int = 0
    aborted: int = 0
    timed_out: int = 0
    rejected: int = 0
    failed: int = 0
    handed_over: int = 0
    """Computed for a peer, in full; it may have gone before it took all of it."""
    preempted: int = 0
    yielded: int = 0
    """Times one that waited let go of its device pages for another."""
    restarted: int = 0
    """Begun again because pages it counted on did not arrive."""
    shared_waits: int = 0
    """Held back for a prefix that another request was computing already."""
    computed_prompt_tokens: int = 0
    """Of prompts: not counting what was found in the cache."""
    generated_tokens: int = 0

    def snapshot(self) -> dict[str, int]:
        """By name; those of requests as requests_…"""
        counts = asdict(self)
        tokens = {name: counts.pop(name) for name in ("computed_prompt_tokens", "generated_tokens")}
        return tokens | {f"requests_{name}": count for name, count in counts.items()}
