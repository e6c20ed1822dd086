"""Handover: one request's way from "its prompt is known" to "all its pages are here": receiving.

    QUEUED ──room──▶ LOOKING ──own tiers known──▶ MOVING ──both halves READY──▶ READY
                        └─ a peer is asked           │ ▲ shortfall: repaired; peer gone: the next
                           to compute meanwhile      └─┘

A request that moves has two halves, each PENDING, then READY or FAILED: *restore*, what the own
host and store are to bring back, and *transfer*, what the peer sends. A restore that falls short is
repaired by the peer. With nobody left to ask the transfer FAILED, and the request goes on with what
it has: it computes the rest itself. The match is made once, before anything is promised, and used
throughout.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quire.disagg.host_budget import PageClaim, PageCounts
from quire.manager import Intake, Lease
from quire.peer.messages import Complete, Found, Offer


class Half(enum.StrEnum):
    """Of a hand-over: the own part, or the peer's."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


class Stage(enum.StrEnum):
    QUEUED = "queued"
    """For room; it holds nothing."""
    LOOKING = "looking"
    """In its own tiers."""
    MOVING = "moving"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class DecodePrefixMatch:
    """What the receiver has of a prompt, in pages, when it decides what to ask for."""

    device: int
    host: int
    store: int
    """Found in the store, and being fetched from there."""
    wanted: int
    """Pages of the prompt that are to be there before it can run."""

    @property
    def promised(self) -> int:
        """Pages that the peer need not send."""
        return self.device + self.host + self.store

    @property
    def needs_restore(self) -> bool:
        return self.promised > self.device


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """What is told to a peer."""

    tokens: bytes
    """All of the prompt: little-endian int32."""
    salt: str = ""
    priority: int = 0
    trace: str = ""
    """Of the request: both sides tell of the hand-over under this name."""


@dataclass(slots=True)
class DueRepair:
    """Pages [first, last) that are asked for again, at a time."""

    at_s: float
    first: int
    last: int
    reason: str


@dataclass(slots=True)
class Try:
    """One asking of one peer."""

    id: str
    link: str
    first: int
    """Full page from which on what the peer offers is read."""
    intake: Intake
    said_s: float
    """When the peer last heard that it is still wanted."""
    grants: set[int] = field(default_factory=set)
    """Offers taken: one that comes twice is ignored."""
    held: list[Offer] = field(default_factory=list)
    """Offers that came before the own tiers were known."""
    complete: Complete | None = None
    reached: int = 0
    """Up to which page there was everything."""
    repairs: int = 0
    repair: DueRepair | None = None
    """The last of them, until it is sent."""
    estimate_s: float | None = None
    """How long the peer says that it will be before it begins; None: it has not said."""
    received: int = 0
    """Pages of its intake that are counted."""


@dataclass(slots=True, eq=False)
class Handover:
    owner: str
    lease: Lease
    prompt: AskedPrompt
    wanted: int
    """Pages of the prefix."""
    need: PageCounts
    """On the host."""
    sources: list[str]
    """Peers to ask, in this order."""
    began_s: float
    compute: bool
    """The peer is to compute what it lacks; without that it is only asked for what it has, and a
    hand-over that comes to nothing is no failure."""
    from_store: bool
    """The own store is asked, before a peer is read from."""
    is_counted: bool = False
    """What was promised, and what of it was there, is counted: once for a request."""
    claim: PageClaim | None = None
    """Of what it needs; made when it is the next to be let in."""
    least: int = field(init=False)
    """Pages that must be there before it runs; what lies behind them it computes itself."""
    stage: Stage = Stage.QUEUED
    restore: Half = Half.PENDING
    transfer: Half = Half.PENDING
    match: DecodePrefixMatch | None = None
    current: Try | None = None
    tries: int = 0
    pause_until_s: float = 0.0
    """Nobody is asked before."""
    moving_s: float = 0.0
    """Since when it moves."""
    progress_s: float = 0.0
    """When something last came of it."""
    restored: int = 0
    """Pages of the own tiers that were really there."""
    landed: int = 0
    """Those of them that came from the store."""
    received: int = 0
    """Pages received, of all components and from all peers asked."""
    found: Found = field(default_factory=Found)
    """What the peer had, by tier."""
    repaired: dict[str, int] = field(default_factory=dict)
    """Pages asked for again, by reason."""
    why: str = ""
    """Of the last thing that went wrong."""
    peer: str = ""
    """The last that was asked …"""
    asked: str = ""
    """… and by what name: that peer tells of it under the same."""

    def __post_init__(self) -> None:
        self.least = self.wanted if self.compute else 0

    @property
    def promised(self) -> int:
        return self.match.promised if self.match is not None else self.lease.tail.end


def describe(handover: Handover, now: float) -> dict[str, str | int | float]:
    """One hand-over in words and numbers, for a log line or an administrator. Sizes in pages."""
    match, stage = handover.match, handover.stage
    about: dict[str, str | int | float] = {
        "request": handover.owner,
        "stage": stage.value,
        "id": handover.asked,
        "peer": handover.peer,
        "tries": handover.tries,
        "wanted": handover.wanted,
        "restore": handover.restore.value,
        "transfer": handover.transfer.value,
        "restored": handover.restored,
        "received": handover.received,
        "seconds": round(now - handover.began_s, 4),
    }
    if match is not None:
        about |= {
            "promised": match.promised,
            "device": match.device,
            "host": match.host,
            "store": match.store,
        }
    if handover.moving_s:
        about["moving_s"] = round(now - handover.moving_s, 4)
    about |= {f"repaired:{reason}": count for reason, count in handover.repaired.items()}
    current = handover.current
    if current is not None and current.estimate_s is not None:
        about["estimate_s"] = round(current.estimate_s, 3)
    if handover.why:
        about["why"] = handover.why
    return about
