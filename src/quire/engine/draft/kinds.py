"""How tokens are proposed ahead, as an option says it: `off`, `ngram`, `eagle`, `eagle:DIR`, and
`eagle-tree`, `eagle-tree:DIR`: with what else may stand in the place of each token.

Knows text only: no torch, so that settings can be checked without it.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from quire.errors import ConfigError

MAX_DRAFT_TOKENS = 15
"""With the token before them one tile of attention."""


_TREE = "eagle-tree"
BRANCHES = 1
"""Of a tree: the second best is right often enough, the third is not."""


class DraftKind(enum.StrEnum):
    OFF = "off"
    NGRAM = "ngram"
    """Looked up in the request's own text."""
    EAGLE = "eagle"
    """By a head made for the model."""


class DraftChoice(NamedTuple):
    kind: DraftKind
    head: str = ""
    """Directory of a head; empty: the one that comes with the model."""
    branches: int = 0
    """Tokens that are proposed beside each other one: see branches.py."""


def parse_draft(text: str) -> DraftChoice:
    """Raises ConfigError with the second half of a sentence."""
    name, colon, head = text.partition(":")
    branches = BRANCHES if name == _TREE else 0
    if branches:
        name = DraftKind.EAGLE
    if name not in list(DraftKind) or (colon and not head) or (head and name != DraftKind.EAGLE):
        raise ConfigError(
            "use off, ngram, eagle, or eagle:DIR with the directory of a draft head; or eagle-tree "
            "in the place of eagle"
        )
    return DraftChoice(DraftKind(name), head, branches)
