"""A trace made up: chats that share system prompts, as many assistants with many users do.

Each session begins with the system prompt of its group, goes on for a few turns, and then a new
one begins in its place. Popular groups have more sessions than others. By seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from quire.replay.trace import BLOCK_TOKENS, Trace, TraceHeading, TraceLine, trace_of


@dataclass(frozen=True, slots=True)
class Chats:
    groups: int
    """Shared system prompts."""
    requests: int = 10_000
    active: int = 400
    """Sessions at a time."""
    turns: int = 8
    system_blocks: int = 8
    turn_blocks: int = 3
    """At most; one at least."""
    rate: float = 4.0
    """Requests per second."""
    seed: int = 0


def chats(options: Chats) -> Trace:
    chance = Random(options.seed)
    weights = [1 / (rank + 1) for rank in range(options.groups)]
    systems = [
        [group * options.system_blocks + i for i in range(options.system_blocks)]
        for group in range(options.groups)
    ]
    fresh = options.groups * options.system_blocks
    """The next id that nobody has."""
    sessions: list[list[int]] = [[] for _ in range(options.active)]
    left = [0] * options.active
    lines, at_s = [], 0.0
    for _ in range(options.requests):
        at_s += chance.expovariate(options.rate)
        session = chance.randrange(options.active)
        if not left[session]:
            sessions[session] = list(chance.choices(systems, weights)[0])
            left[session] = chance.randint(1, options.turns)
        left[session] -= 1
        num_new = chance.randint(1, options.turn_blocks)
        sessions[session] += range(fresh, fresh + num_new)
        fresh += num_new
        ids = list(sessions[session])
        lines.append(TraceLine(at_s * 1000, len(ids) * BLOCK_TOKENS, 0, ids))
    return trace_of(f"{options.groups} system prompts", lines, TraceHeading(1, BLOCK_TOKENS))
