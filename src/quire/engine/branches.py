"""Proposals as a tree: a trunk, and beside each of its tokens others that may stand there instead.

    depth        1      2      3
    trunk   ──┬─ d₁ ─┬─ d₂ ─┬─ d₃         in a list: d₁ d₂ d₃, then what is beside d₁, beside d₂, …
              ├─ a₁  ├─ a₂  ├─ a₃         `branches` = 2 beside each; 0: a chain
              └─ b₁  └─ b₂  └─ b₃

Nothing is proposed after a branch. So a head proposes a tree in as many steps as a chain, and where
the trunk was right nothing of it has to move. Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence


def num_levels(count: int, branches: int) -> int:
    """How deep a tree of so many tokens is."""
    assert count % (1 + branches) == 0
    return count // (1 + branches)


def parents(count: int, branches: int) -> list[int]:
    """Of each token, by number, the one that it comes after; −1: what lies before all of them."""
    levels = num_levels(count, branches)
    return [*range(-1, levels - 1), *((n // branches) - 1 for n in range(count - levels))]


def depths(count: int, branches: int) -> list[int]:
    """Of each token, from 1 on."""
    levels = num_levels(count, branches)
    return [*range(1, levels + 1), *((n // branches) + 1 for n in range(count - levels))]


def ancestors(count: int, branches: int) -> list[list[int]]:
    """Of each token, by number: those that it comes after, from the first on."""
    return [list(range(parent + 1)) for parent in parents(count, branches)]


def cut(tokens: Sequence[int], branches: int, levels: int) -> list[int]:
    """The first levels of a tree."""
    whole = num_levels(len(tokens), branches)
    levels = min(levels, whole)
    return [*tokens[:levels], *tokens[whole : whole + levels * branches]]


def joined(trunk: Sequence[int], beside: Sequence[Sequence[int]]) -> list[int]:
    """A tree of its trunk and what is beside each of its tokens."""
    return [*trunk, *(token for level in beside for token in level)]


def walk(tokens: Sequence[int], branches: int, drawn: Sequence[int]) -> list[int]:
    """Which of a tree's tokens were drawn, one after the other, by number. `drawn`: after what
    came before all of them, and after each."""
    found: list[int] = []
    place = _below(tokens, branches, -1, drawn[0])
    while place is not None:
        found.append(place)
        place = _below(tokens, branches, place, drawn[place + 1])
    return found


def placed(tokens: Sequence[int], branches: int, path: Sequence[int]) -> list[int]:
    """By number, the tokens of a tree that a path through it is made of."""
    found: list[int] = []
    for token in path:
        place = _below(tokens, branches, found[-1] if found else -1, token)
        assert place is not None
        found.append(place)
    return found


def _below(tokens: Sequence[int], branches: int, place: int, token: int) -> int | None:
    above = parents(len(tokens), branches)
    fits = (n for n, parent in enumerate(above) if parent == place and tokens[n] == token)
    return next(fits, None)
