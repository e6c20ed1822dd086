"""Where cache events are published. Small enough to travel, and imports nothing."""

from __future__ import annotations

import msgspec


class Publishing(msgspec.Struct, frozen=True):
    """Addresses as ZeroMQ writes them: `tcp://*:5557` listens on every interface."""

    address: str
    replay: str = ""
    """Empty: what was missed cannot be had again."""
    topic: str = ""
