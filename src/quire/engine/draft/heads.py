"""Which draft head goes with which model: the ones that come with Quire, or a directory.

Knows names and fingerprints; files are headweights.py's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import quire.models
from quire.engine.draft.kinds import DraftChoice, DraftKind
from quire.errors import ConfigError
from quire.models import fingerprint

_OURS = Path(quire.models.__file__).parent / "heads"


def find_head(choice: DraftChoice, model_name: str) -> Path | None:
    """None: none is wanted. Raises ConfigError if there is none."""
    if choice.kind is not DraftKind.EAGLE:
        return None
    directory = Path(choice.head).expanduser() if choice.head else _OURS / model_name.lower()
    if directory.is_dir():
        return directory
    if choice.head:
        raise ConfigError(f"speculate: {choice.head} is no directory: give that of a draft head")
    known = ", ".join(sorted(path.name for path in _OURS.iterdir() if path.is_dir()))
    raise ConfigError(
        f"speculate is eagle, and no draft head for {model_name} comes with Quire (only for "
        f"{known}): give one as eagle:DIR, made by `quire train-eagle`, or use ngram"
    )


def with_head(weights: str, head: Path) -> str:
    """Fingerprint of a model and its head together: what is cached holds the state of both."""
    return hashlib.sha256(f"{weights}\0{fingerprint(head)}".encode()).hexdigest()
