"""The commands by name, each with an example. Loads what parses options, nothing that measures."""

from collections.abc import Callable

from evidence.disagg.command import disagg
from evidence.hybrid.command import hybrid
from evidence.overhead.command import overhead
from evidence.pd.command import pd
from evidence.schemas.command import schemas

COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "disagg": (disagg, "--stall-rounds 0 --json"),
    "hybrid": (hybrid, "--repeats 3 --rounds 6"),
    "overhead": (overhead, "--rounds 10"),
    "pd": (pd, "--layers 12 --limit 120 --out pd.json"),
    "schemas": (schemas, "--count 50 --json"),
}
