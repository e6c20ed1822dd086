"""The one prefix tree: nodes, what they hold, and in which order it goes."""

from quire.tree.joining import rest, rest_below
from quire.tree.node import (
    NUM_TIERS,
    Freed,
    Holding,
    Inserted,
    Node,
    Root,
    Tenant,
    Walk,
    held_pages,
    slot_of,
)
from quire.tree.spares import next_spare
from quire.tree.standing import Standing
from quire.tree.stays import Stays, may_go
from quire.tree.tree import PrefixTree

__all__ = [
    "NUM_TIERS",
    "Freed",
    "Holding",
    "Inserted",
    "Node",
    "PrefixTree",
    "Root",
    "Standing",
    "Stays",
    "Tenant",
    "Walk",
    "held_pages",
    "may_go",
    "next_spare",
    "rest",
    "rest_below",
    "slot_of",
]
