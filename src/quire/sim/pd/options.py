"""SimPdOptions: which engines a simulated cluster has, and how badly it is treated.

As SimOptions: everything follows from the seed, any field may be overridden, and `command` names
the overrides that a repetition needs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from random import Random

from quire.config import PrefetchPolicy, WritePolicy
from quire.sim.options import ComponentMix, SimOptions, command_line


class Topology(enum.Enum):
    PD = "pd"
    """Prefill engines, and decode engines that ask them."""
    PEERS = "peers"
    """Unified engines that use each other's pages."""


@dataclass(frozen=True, slots=True)
class SimPdOptions:
    topology: Topology = Topology.PD
    prefills: int = 1
    """Prefill engines; in the other topology there is none."""
    decodes: int = 1
    """Decode engines; in the other topology unified ones."""
    prefill_ranks: int = 1
    decode_ranks: int = 1
    mix: ComponentMix = ComponentMix.FULL
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    restore: bool = True
    """Decode engines use their own host and the store."""
    page_size: int = 4
    device_pages: int = 40
    host_pages: int = 60
    window_pages: int = 2
    device_windows: int = 40
    host_windows: int = 40
    device_slots: int = 16
    host_slots: int = 16
    threshold_pages: int = 1
    chunk_pages: int = 4
    """Prompt pages computed in one step."""
    concurrency: int = 5
    """Requests alive at once."""
    timeout_s: float = 3.0
    """Without progress for so long, a peer is given up."""
    fault_rate: float = 0.0
    """Share of backend calls that go wrong."""
    slow_share: float = 0.0
    stuck_share: float = 0.0
    abort_rate: float = 0.0
    """Per step, as all rates."""
    kill_rate: float = 0.0
    """An engine dies, and a fresh one takes its place."""
    cut_rate: float = 0.0
    stall_rate: float = 0.0
    leap_rate: float = 0.0
    """Everybody is held up for a while: all that is due meanwhile is met at once."""
    forget_rate: float = 0.0
    """The store loses some pages."""
    evict_rate: float = 0.0
    """An engine's tier is flushed, so far as nobody uses it."""
    duplicated: float = 0.0
    """Share of messages, as the next two."""
    reordered: float = 0.0
    delayed: float = 0.0

    strict: bool = False
    """Every call of the managers is watched: see quire.sim.watch."""
    store_pages: int = 0
    """Pages that the store of all engines has room for; 0: as many as come."""
    lane_pages_s: float = 0.0
    """What each rank carries between device and host, and as much to the store; 0: everything."""
    link_pages_s: float = 0.0
    """What each engine sends to all others, and gets from them; 0: everything."""
    arrivals: float = 0.0
    """Per step, alone or together, whether others are answered or not; 0: there are never more
    calls than `concurrency`."""

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
        )

    @classmethod
    def for_swarm(cls, seed: int) -> SimPdOptions:
        """With what runs out drawn as well, and every call watched; what follows from the seed
        alone stays as it was."""
        rng = Random(f"quire swarm options {seed}")
        return replace(
            cls.from_seed(seed),
            strict=True,
            store_pages=rng.choice((0, rng.randrange(20, 200))),
            lane_pages_s=rng.choice((0.0, 100.0, 400.0)),
            link_pages_s=rng.choice((0.0, 50.0, 200.0)),
            arrivals=rng.choice((0.0, 0.05, 0.15)),
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
        return SimOptions(
            ranks=ranks,
            write_policy=self.write_policy,
            prefetch_policy=self.prefetch_policy,
            page_size=self.page_size,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            mix=self.mix,
            window_pages=self.window_pages,
            device_windows=self.device_windows,
            host_windows=self.host_windows,
            device_slots=self.device_slots,
            host_slots=self.host_slots,
            threshold_pages=self.threshold_pages,
        )

    def command(self, seed: int, steps: int) -> str:
        """The exact command that repeats a run with these options."""
        return command_line("pd", self, SimPdOptions.from_seed(seed), seed, steps)
