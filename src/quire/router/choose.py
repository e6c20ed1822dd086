"""choose(): the servers for one prompt, by prefix and load. Pure, and says why.

Each side is chosen for itself, by what it would cost there, in tokens:

    decode     tokens it lacks and would have to fetch      + its load
    prefill    tokens it lacks and would have to compute    + its load

Load is what a prompt that comes now waits behind, in the same unit:

    a request                    REQUEST_TOKENS: its place in every step, for an answer of which
                                 nobody knows how long it will be
    + until it is told a token   the tokens of its prompt that were not cached there
    + from then on               a RUNNING_PART of them: they are read in every step, not computed

(A prefill server needs the whole prefix itself, whatever the decode server has.) The cheapest wins;
among equals they take turns. All other prefill servers follow in their order, for the decode server
to turn to.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    name: str
    load: int
    """What is there to do, in tokens."""
    matched_tokens: int = 0
    """Of this prompt, from its beginning."""


class By(enum.StrEnum):
    ONLY = "only"
    """There was no other."""
    AFFINITY = "affinity"
    """It has more of the prefix than another that was no busier."""
    LOAD = "load"


class Ranked(NamedTuple):
    names: tuple[str, ...]
    """Best first."""
    by: By
    """What put the first one there."""


REQUEST_TOKENS = 1024
RUNNING_PART = 16
KEYED_REQUESTS = 4
"""A server that a request's `prompt_cache_key` favours may be so many requests like it busier than
others, who have as many tokens of the prompt."""


def foreign_load(requests: int, reported: int, running_tokens: int, waiting_tokens: int) -> int:
    """Of `requests` that are not ours, of all that a server `reported`, whose tokens are all that
    is known: on the mean they are like the others."""
    if not requests:
        return 0
    tokens = waiting_tokens + running_tokens // RUNNING_PART
    return requests * REQUEST_TOKENS + tokens * requests // max(reported, requests)


def favoured(names: Sequence[str], cache_key: str) -> str:
    """The server that requests of this key go to: the same for every router, and for most keys also
    when servers come and go."""

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{cache_key}\0{name}".encode(), digest_size=16).digest()

    return max(names, key=weight)


def rank(candidates: Sequence[Candidate], num_tokens: int, turn: int = 0) -> Ranked:
    """`candidates` must not be empty. `turn` grows by one with each call."""

    def cost(candidate: Candidate) -> int:
        return num_tokens - candidate.matched_tokens + candidate.load

    start = turn % len(candidates)
    rotated = [*candidates[start:], *candidates[:start]]
    ordered = sorted(rotated, key=cost)  # stable: equals stay in the order of their turns
    best, *others = ordered
    if not others:
        by = By.ONLY
    else:
        is_liked = any(
            each.load <= best.load and each.matched_tokens < best.matched_tokens for each in others
        )
        by = By.AFFINITY if is_liked else By.LOAD
    return Ranked(tuple(each.name for each in ordered), by)
