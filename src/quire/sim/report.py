"""SimReport: what a simulation did; SimulationError: what it found."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.errors import InvariantError
from quire.sim.options import SimOptions


class SimulationError(InvariantError):
    """A simulated run broke a rule. The message ends with the command that repeats it."""


@dataclass(slots=True)
class Tally:
    """What the simulated engine counts."""

    arrived: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    """Given up for want of device pages."""
    restarted: int = 0
    """Began again because a load had failed."""
    generated_tokens: int = 0
    accepted_tokens: int = 0
    """Of those drafted."""
    rejected_tokens: int = 0
    computed_pages: int = 0
    reused_pages: int = 0
    checked_pages: int = 0
    """Pages of page tables compared with what they must hold, counted per rank."""
    audited_pages: int = 0
    """Pages READY in the tree compared likewise."""


@dataclass(frozen=True, slots=True)
class SimReport:
    seed: int
    steps: int
    options: SimOptions
    virtual_s: float
    digest: str
    """Of every command and every report, with its time: equal runs have equal digests."""
    tally: Tally
    counters: dict[str, int]
    """The manager's own."""
    faults: dict[str, int] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """(what, figure) for a table."""
        options = self.options
        kind = (
            f"{options.ranks} ranks, {options.write_policy.value}, "
            f"{options.prefetch_policy.value}, {options.eviction.value}, "
            f"{options.units.value} units, components {options.mix.value}"
        )
        tally = self.tally
        rows = [
            ("cache", kind),
            ("steps", f"{self.steps:,}"),
            ("virtual time", f"{self.virtual_s:,.1f} s"),
            ("requests finished", f"{tally.finished:,} of {tally.arrived:,}"),
            ("aborted / preempted", f"{tally.aborted:,} / {tally.preempted:,}"),
            ("restarted after a failed load", f"{tally.restarted:,}"),
            ("pages reused / computed", f"{tally.reused_pages:,} / {tally.computed_pages:,}"),
            ("drafts kept / rejected", f"{tally.accepted_tokens:,} / {tally.rejected_tokens:,}"),
            ("pages checked", f"{tally.checked_pages + tally.audited_pages:,}"),
            ("faults injected", f"{sum(self.faults.values()):,}"),
            ("trace", self.digest),
        ]
        return rows
