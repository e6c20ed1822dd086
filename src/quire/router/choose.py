"""choose(): the servers for one prompt, by prefix and load. Pure, and says why.

Each side is chosen for itself, by what it would cost there, in pages:

    decode     pages it lacks and would have to fetch      + load_pages * its load
    prefill    pages it lacks and would have to compute    + load_pages * its load

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
    """Requests there."""
    matched_pages: int = 0
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


KEYED_REQUESTS = 4
"""A server that a request's `prompt_cache_key` favours may be so many requests busier than others,
who have as many pages of the prompt."""


def favoured(names: Sequence[str], cache_key: str) -> str:
    """The server that requests of this key go to: the same for every router, and for most keys also
    when servers come and go."""

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{cache_key}\0{name}".encode(), digest_size=16).digest()

    return max(names, key=weight)


def rank(candidates: Sequence[Candidate], num_pages: int, load_pages: int, turn: int = 0) -> Ranked:
    """`candidates` must not be empty. `turn` grows by one with each call."""

    def cost(candidate: Candidate) -> int:
        return num_pages - candidate.matched_pages + load_pages * candidate.load

    start = turn % len(candidates)
    rotated = [*candidates[start:], *candidates[:start]]
    ordered = sorted(rotated, key=cost)  # stable: equals stay in the order of their turns
    best, *others = ordered
    if not others:
        by = By.ONLY
    else:
        is_liked = any(
            each.load <= best.load and each.matched_pages < best.matched_pages for each in others
        )
        by = By.AFFINITY if is_liked else By.LOAD
    return Ranked(tuple(each.name for each in ordered), by)
