"""Faults that a test chooses: none, the n-th call, or all calls of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from quire.manager.operations import OperationKind
from quire.sim.faults import FAULTS_OF, Fault


class NoFaults:
    def on_call(self, kind: OperationKind, rank: int) -> Fault | None:
        return None


class NthCallFails:
    """Exactly the n-th backend call fails (n counts from 1), in the way numbered `variant`."""

    def __init__(self, n: int, variant: int = 0) -> None:
        self._n = n
        self._variant = variant
        self.num_calls = 0
        self.hit: OperationKind | None = None

    def on_call(self, kind: OperationKind, rank: int) -> Fault | None:
        self.num_calls += 1
        if self.num_calls != self._n:
            return None
        self.hit = kind
        possible = FAULTS_OF[kind]
        return possible[self._variant % len(possible)]


class RankFails:
    """One rank fails in every call of the kinds given; the others never do."""

    def __init__(
        self, rank: int, kinds: Sequence[OperationKind], fault: Fault = Fault.FAIL
    ) -> None:
        self._rank = rank
        self._kinds = frozenset(kinds)
        self._fault = fault

    def on_call(self, kind: OperationKind, rank: int) -> Fault | None:
        return self._fault if rank == self._rank and kind in self._kinds else None
