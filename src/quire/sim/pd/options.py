"""SimPdOptions: which engines a simulated cluster has, and how badly it is treated.
OverloadOptions: one whose lines are offered too much.

As SimOptions: everything follows from the seed, any field may be overridden, and `command` names
the overrides that a repetition needs.
"""
# ruff: noqa: RUF009 - option() makes a field

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from random import Random

from quire.config import PrefetchPolicy, WritePolicy
from quire.sim.options import (
    CACHE,
    TROUBLE,
    CommonOptions,
    ComponentMix,
    SimOptions,
    UnitMix,
    command_line,
    draws_both,
    draws_drafts,
    option,
    watched,
)


class Topology(enum.Enum):
    PD = "pd"
    """Prefill engines, and decode engines that ask them."""
    PEERS = "peers"
    """Unified engines that use each other's pages."""


OVERLOAD_PAGE_SIZE = 8
"""Few prompts begin with the same page by chance."""
_PATIENCE = 4.0
"""Times what would be ideal, until a run that does not clear is called off."""
_LOAD = "The load"
CLUSTER = "The engines (by default all of it follows from the seed)"


@dataclass(frozen=True, slots=True)
class SimPdOptions(CommonOptions):
    topology: Topology = option(
        Topology.PD, "Prefill and decode engines, or unified ones that share pages.", CLUSTER
    )
    prefills: int = option(1, "Prefill engines.", CLUSTER, 0)
    decodes: int = option(1, "Decode (or unified) engines.", CLUSTER, 1)
    prefill_ranks: int = option(1, "Ranks of each prefill.", CLUSTER, 1)
    decode_ranks: int = option(1, "Ranks of each other.", CLUSTER, 1)
    timeout_s: float = option(3.0, "Without progress, until a peer is given up.", CLUSTER)
    restore: bool = option(True, "Decodes use their own host and the store.", CLUSTER)
    chunk_pages: int = option(4, "Computed in one step.", CACHE, 1)
    ahead: bool = option(False, "Batches are chosen before those ahead of them ended.", CACHE)
    kill_rate: float = option(0.0, "Deaths of engines per step; a fresh one follows.", TROUBLE)
    cut_rate: float = option(0.0, "Lines cut per step.", TROUBLE)
    stall_rate: float = option(0.0, "Lines stalled per step.", TROUBLE)
    leap_rate: float = option(0.0, "Standstills of all per step.", TROUBLE)
    forget_rate: float = option(0.0, "Losses in the store per step.", TROUBLE)
    evict_rate: float = option(0.0, "Flushes of a tier per step.", TROUBLE)
    duplicated: float = option(0.0, "Share of messages sent twice.", TROUBLE)
    reordered: float = option(0.0, "Share that may overtake.", TROUBLE)
    delayed: float = option(0.0, "Share that comes late.", TROUBLE)
    link_pages_s: float = option(0.0, "Pages a second of each engine's line; 0: any.", TROUBLE)
    max_running: int = option(4, "Requests that each engine runs.", CLUSTER, 1)
    max_waiting: int = option(16, "Requests that each engine lets wait.", CLUSTER, 0)
    patience_s: float = option(240.0, "In which a call must be answered, or refused.", CLUSTER)

    # Other than those of a cache alone, unless given:
    threshold_pages: int = 1
    window_pages: int = 2
    device_windows: int = 40
    host_windows: int = 40
    host_slots: int = 16
    concurrency: int = 5
    fault_rate: float = 0.0
    slow_share: float = 0.0
    stuck_share: float = 0.0
    abort_rate: float = 0.0

    @classmethod
    def from_seed(cls, seed: int) -> SimPdOptions:
        rng = Random(f"quire sim pd options {seed}")
        topology = Topology.PEERS if seed % 5 == 4 else Topology.PD
        peers = topology is Topology.PEERS
        ranks = rng.choice(((1, 1), (1, 1), (1, 2), (2, 1), (2, 2)))
        return cls(
            topology=topology,
            prefills=0 if peers else rng.choice((1, 2)),
            decodes=rng.choice((2, 3)) if peers else rng.choice((1, 2)),
            prefill_ranks=ranks[0],
            decode_ranks=ranks[1],
            mix=list(ComponentMix)[seed % 4],
            write_policy=list(WritePolicy)[seed // 2 % 3],
            prefetch_policy=list(PrefetchPolicy)[seed // 3 % 3],
            restore=rng.random() < 0.85,
            page_size=rng.choice((1, 2, 4)),
            device_pages=rng.choice((rng.randrange(24, 30), rng.randrange(30, 60))),
            host_pages=rng.choice((rng.randrange(16, 32), rng.randrange(40, 80))),
            window_pages=rng.choice((1, 2, 3)),
            device_windows=rng.randrange(26, 44),
            host_windows=rng.choice((rng.randrange(12, 20), rng.randrange(20, 40))),
            device_slots=rng.choice((rng.randrange(6, 9), rng.randrange(12, 24))),
            host_slots=rng.choice((rng.randrange(4, 7), rng.randrange(8, 20))),
            threshold_pages=rng.choice((1, 1, 2)),
            chunk_pages=rng.choice((1, 3, 6)),
            concurrency=rng.randrange(2, 8),
            timeout_s=rng.choice((1.0, 3.0)),
            fault_rate=rng.choice((0.0, 0.01, 0.05, 0.15)),
            slow_share=rng.choice((0.0, 0.02, 0.1)),
            stuck_share=rng.choice((0.0, 0.0005, 0.002)),
            abort_rate=rng.choice((0.0, 0.01, 0.03)),
            kill_rate=rng.choice((0.0, 0.0, 0.002, 0.006)),
            cut_rate=rng.choice((0.0, 0.002, 0.01)),
            stall_rate=rng.choice((0.0, 0.002, 0.005)),
            leap_rate=rng.choice((0.0, 0.0, 0.004)),
            forget_rate=rng.choice((0.0, 0.01, 0.05)),
            evict_rate=rng.choice((0.0, 0.002, 0.01)),
            duplicated=rng.choice((0.0, 0.05, 0.2)),
            reordered=rng.choice((0.0, 0.0, 0.1)),
            delayed=rng.choice((0.0, 0.02)),
            both=draws_both(seed),
            units=_draws_units(seed),
            drafts=draws_drafts(seed),
        )

    @classmethod
    def for_swarm(cls, seed: int) -> SimPdOptions:
        """With what runs out drawn as well; what follows from the seed alone stays as it was."""
        rng = Random(f"quire swarm options {seed}")
        return replace(
            cls.from_seed(seed),
            **watched(seed),
            store_pages=rng.choice((0, rng.randrange(20, 200))),
            lane_pages_s=rng.choice((0.0, 100.0, 400.0)),
            link_pages_s=rng.choice((0.0, 50.0, 200.0)),
            arrivals=rng.choice((0.0, 0.05, 0.15)),
            ahead=rng.random() < 0.5,
        )

    @property
    def is_calm(self) -> bool:
        """Nothing ever goes wrong or runs out: then nobody may be turned away."""
        trouble = (
            *(self.fault_rate, self.slow_share, self.stuck_share, self.kill_rate, self.cut_rate),
            *(self.stall_rate, self.leap_rate, self.reordered, self.delayed, self.arrivals),
        )
        return not any(trouble)

    def engine(self, ranks: int) -> SimOptions:
        """What the cache of one engine is like."""
        common = {f.name: getattr(self, f.name) for f in fields(CommonOptions)}
        return SimOptions(ranks=ranks, **common)

    def command(self, seed: int, steps: int) -> str:
        """The exact command that repeats a run with these options."""
        return command_line("pd", self, SimPdOptions.from_seed(seed), seed, steps)


@dataclass(frozen=True, slots=True)
class OverloadOptions:
    servers: int = option(100, "Engines, half of them prefill.", _LOAD, 2)
    sessions: int = option(10_000, "That ask once each.", _LOAD, 1)
    times: float = option(4.0, "What is offered, as a multiple of what the lines carry.", _LOAD)
    seconds: float = option(120.0, "In which the sessions come, in virtual time.", _LOAD)
    least_pages: int = option(4, "Of a prompt.", _LOAD, 1)
    most_pages: int = option(48, "Of a prompt.", _LOAD, 1)
    host_pages: int = option(300, "Of each engine.", _LOAD, 1)
    timeout_s: float = option(3.0, "Without progress, until a peer is given up.", _LOAD)
    turn_s: float = option(0.4, "Virtual time from one turn of an engine to the next.", _LOAD)

    @property
    def prefills(self) -> int:
        return self.servers // 2

    @property
    def decodes(self) -> int:
        return self.servers - self.prefills

    @property
    def link_pages_s(self) -> float:
        """Of each engine's line, so that the load is what it should be."""
        mean = (self.least_pages + self.most_pages) / 2
        return self.sessions * mean / self.seconds / self.times / self.decodes

    def cluster(self) -> SimPdOptions:
        """Lines are short, and nothing else."""
        return SimPdOptions(
            prefills=self.prefills,
            decodes=self.decodes,
            page_size=OVERLOAD_PAGE_SIZE,
            device_pages=2 * self.host_pages,
            host_pages=self.host_pages,
            link_pages_s=self.link_pages_s,
            timeout_s=self.timeout_s,
            arrivals=1.0,  # nobody waits for room before asking
            chunk_pages=2 * self.most_pages,
            max_running=16,
            max_waiting=self.sessions,
            patience_s=_PATIENCE * (1 + self.times) * self.seconds,
            store_pages=1000,  # nobody reads it
            restore=False,
        )


def _draws_units(seed: int) -> UnitMix:
    """Of its own generator: what else follows from the seed stays as it was."""
    mixes = (UnitMix.TOKEN, UnitMix.TOKEN, UnitMix.PAIR, UnitMix.PAIR, UnitMix.BOTH)
    return Random(f"quire sim units {seed}").choice(mixes)
