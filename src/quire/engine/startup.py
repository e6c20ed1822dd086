"""What an engine process is started with: its message, and its environment."""

from __future__ import annotations

import os

import msgspec

from quire.engine.config import EngineConfig


class EngineStartup(msgspec.Struct, frozen=True):
    """Of an engine process."""

    address: str
    config: EngineConfig


def model_environment() -> dict[str, str]:
    """The environment of a process that computes on CPU threads.

    OpenMP's threads spin while they wait for each other; whenever anything else wants a core (our
    own copies and I/O, another process) that costs up to ten times the computation. A person who
    has set the policy knows better.
    """
    return {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", **os.environ}
