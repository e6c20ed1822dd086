"""What a receiver is told, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from quire.disagg.contacts import Patience


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    timeout_s: float = 30.0
    """Without progress for so long, a peer is given up."""
    rounds: int = 2
    max_tries: int = 6
    """How often every peer is asked, and how often all of them together, before the request
    computes what it lacks itself."""
    first_pause_s: float = 0.1
    last_pause_s: float = 2.0
    """Before a peer is asked again, by a repair or anew: it doubles from the one to the other."""
    local_pages: int = 0
    """A request that lacks no more computes them itself."""
    load_pages: int = 64
    """That have come, before they are copied on to the device together."""
    patience: Patience = field(default_factory=Patience)


@dataclass(slots=True)
class ReceiverCounters:
    promised_pages: int = 0
    restored_pages: int = 0
    transfers: int = 0
    transfer_s: float = 0.0
    restores: Counter[str] = field(default_factory=Counter)
    restore_s: dict[str, float] = field(default_factory=dict)
    repairs: Counter[str] = field(default_factory=Counter)
    local: Counter[str] = field(default_factory=Counter)
    """Hand-overs whose request computes what it lacks itself, by reason."""
