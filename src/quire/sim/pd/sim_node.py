"""SimNode: one engine of a simulated cluster, in one of its lives.

Everything but the hands is real: engine, scheduler, cache manager, both sides of the hand-over. The
workers, the model and the hub are simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from quire.disagg.config import ReceiverConfig
from quire.disagg.contacts import Patience
from quire.disagg.exchange import Exchange
from quire.disagg.giving import Giver
from quire.disagg.handover import Half, Handover, Stage
from quire.disagg.receiving import Receiver
from quire.engine.config import Role
from quire.engine.engine import Engine, tiers
from quire.engine.handovers import Handovers, Prefills
from quire.engine.messages import EngineInfo, Output, Outputs
from quire.engine.queue import Queue
from quire.engine.scheduler import Scheduler
from quire.keys import UnitKind
from quire.manager import CacheManager, StoreState, Way
from quire.manager.inspection import inspect
from quire.messages import PeerPart
from quire.peer.hub import Hello
from quire.peer.identity import Identity
from quire.sim.apart import Apart
from quire.sim.audit import audit
from quire.sim.bandwidth import SimLinks
from quire.sim.clock import VirtualClock
from quire.sim.content import Oracle, Pools
from quire.sim.faults import RandomFaults
from quire.sim.latency import Latency
from quire.sim.network import SimNetwork
from quire.sim.options import ComponentMix
from quire.sim.pd.drafts import speculation
from quire.sim.pd.health import ALL, ClusterHealth, line
from quire.sim.pd.model import SimModel
from quire.sim.pd.options import SimPdOptions
from quire.sim.peers import Serving, SimPeers
from quire.sim.report import SimulationError
from quire.sim.store import SimStores
from quire.sim.watch import WatchedManager
from quire.sim.workers import SimWorkers
from quire.sim.workload import ALPHABET
from quire.types import Tier

FINGERPRINT, DTYPE = "model", "float32"


@dataclass(slots=True)
class World:
    """What the engines of a cluster have in common."""

    seed: int
    options: SimPdOptions
    clock: VirtualClock
    oracle: Oracle
    apart: Apart
    network: SimNetwork
    stores: SimStores
    links: SimLinks
    health: ClusterHealth
    trace: Callable[[bytes], None]
    servers: dict[str, Serving] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    """What happened, in engines dead and alive."""
    is_calm: bool = False
    """Nothing goes wrong any more."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where an engine lives, whoever it is at the moment."""

    name: str
    role: Role
    ranks: int
    unit: UnitKind
    prefill: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return f"tcp://{self.name}:1"


class SimNode:
    def __init__(self, world: World, place: NodePlace, life: int) -> None:
        options, clock = world.options, world.clock
        self.place = place
        self.epoch = f"{place.name}.{life}"
        self.alive = True
        self.born_s = clock()
        self._world = world
        self._local: set[str] = set()
        """Requests that compute what nobody could be asked for."""
        self._newly_local: list[Handover] = []
        rngs = {part: Random(f"{world.seed} {self.epoch} {part}") for part in _PARTS}
        draw = rngs["node"]
        cache = options.engine(place.ranks)
        self.pools = Pools(place.ranks, cache.pool_sizes())
        self.serving = world.servers[self.epoch] = Serving(self.pools, self.epoch, place.address)
        weights = [draw.choice((0.3, 1.0, 2.0)) for _ in range(place.ranks)]
        factors = [draw.choice((0.3, 1.0, 3.0)) for _ in range(place.ranks)]
        health = world.health
        self.faults = RandomFaults(
            rngs["faults"], options.fault_rate, weights, lambda: health.disturbed(self.epoch)
        )
        self.latency = Latency(
            rngs["latency"],
            factors,
            slow_share=options.slow_share,
            stuck_share=options.stuck_share,
            tell=lambda seconds: health.disturbed(self.epoch, seconds),
        )
        self.workers = SimWorkers(
            self.pools,
            world.stores,
            clock=clock,
            faults=self.faults,
            latency=self.latency,
            rng=rngs["workers"],
            lane_pages_s=options.lane_pages_s,
            peers=SimPeers(place.address, world.network.line, world.servers, world.links),
            serving=self.serving,
        )
        self._check_every = options.check_every
        manager = WatchedManager if options.strict else CacheManager
        self.manager = manager(cache.cache_config(), clock=clock, components=cache.components())
        self.manager.costs.force(Way.BOTH if options.both else None)
        has_window = options.mix in (ComponentMix.WINDOW, ComponentMix.BOTH)
        has_state = options.mix in (ComponentMix.RECURRENT, ComponentMix.BOTH)
        queue = Queue(max_running=options.max_running, max_waiting=options.max_waiting, clock=clock)
        self.model = SimModel(
            world.oracle,
            queue.get,
            self.pools,
            self.workers,
            page_size=options.page_size,
            window_tokens=options.window_pages * options.page_size if has_window else 0,
            may_compute=lambda name: place.role is not Role.DECODE or name in self._local,
            overlaps=options.ahead,
            rng=rngs["model"],
            trace=world.trace,
        )
        max_context = options.device_pages * options.page_size - 1
        self.hub = world.network.open(self._hello(), place.address)
        receiver = self._receiver(queue)
        self.scheduler = Scheduler(
            self.manager,
            queue,
            chunk_tokens=options.chunk_pages * options.page_size + 2 * options.drafts,
            remote=self._remote(receiver),
            speculation=speculation(rngs["drafts"], 0 if has_state else options.drafts, place.unit),
        )
        info = EngineInfo(
            place.name, FINGERPRINT, "sim", DTYPE, place.ranks, options.page_size, ALPHABET,
            max_context, tiers(self.manager, dict.fromkeys(cache.pool_sizes(), 1)), "",
            role=place.role, unit=place.unit,
        )  # fmt: skip
        giver = Giver(
            self.manager,
            Prefills(self.scheduler, info, clock=clock),
            clock=clock,
            send=self.hub.send,
            computing=place.role is not Role.DECODE,
        )
        self.exchange = Exchange(self.hub, receiver, giver)
        self.engine = Engine(
            self.model, self.manager, self.scheduler, info, exchange=self.exchange, clock=clock
        )

    # ---- as quire.engine.neighbours does it ------------------------------------------------------

    def _hello(self) -> Hello:
        place = self.place
        parts = [PeerPart(f"{place.address}{rank}", rank, rank + 1) for rank in range(place.ranks)]
        identity = Identity(1, FINGERPRINT, self._world.options.page_size, DTYPE, [])
        return Hello(identity, self.epoch, place.role.value, parts)

    def _receiver(self, queue: Queue) -> Receiver:
        options = self._world.options
        return Receiver(
            self.manager,
            self.hub,
            name=self.epoch,
            clock=self._world.clock,
            config=ReceiverConfig(
                timeout_s=options.timeout_s, load_pages=3, patience=Patience(1.0, 0.5, 20.0)
            ),
            room=lambda: options.device_pages - queue.used_pages(),
            on_end=self._ended,
        )

    def _remote(self, receiver: Receiver) -> Handovers | None:
        place, decode = self.place, self.place.role is Role.DECODE
        if not decode and not place.peers:
            return None
        return Handovers(
            receiver,
            self.manager,
            prefill=list(place.prefill),
            peers=list(place.peers),
            decode=decode,
            restore=self._world.options.restore or not decode,
        )

    # ---- for the driver -------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """One turn of the engine; what it has to say."""
        if self.manager.store.state is StoreState.DETACHED:
            self.manager.store.attach(f"sim://{self.place.ranks}-ranks")
        self.engine.step()
        if self.model.broken is not None:
            raise self.model.broken
        outputs: list[Output] = []
        for message in self.engine.take_messages():
            if isinstance(message, Outputs):
                outputs += message.outputs
        return outputs

    def could_ask(self, others: list[SimNode], since_s: float) -> list[SimNode]:
        """Who could have computed for it all the time since then."""
        health = self._world.health
        if not (health.is_well(ALL, since_s) and health.is_well(self.epoch, since_s)):
            return []
        return [
            other
            for other in others
            if other.place.address in self.place.prefill
            and other.born_s <= since_s
            and self.hub.is_connected(other.place.address, since_s)
            and health.is_well(other.epoch, since_s)
            and health.is_well(line(self.place.address, other.place.address), since_s)
        ]

    def check_local(self, others: list[SimNode]) -> None:
        """A prompt is computed where it should not be only if no healthy way was left."""
        found, self._newly_local = self._newly_local, []
        for handover in found:
            could = [other.epoch for other in self.could_ask(others, handover.began_s)]
            if could:
                raise SimulationError(
                    f"{handover.owner} is computed by {self.epoch}, and {', '.join(could)} could "
                    f"do it: {handover.why}"
                )

    def check(self, step: int) -> None:
        if step % self._check_every == 0:
            self.manager.check_invariants()
        if isinstance(self.manager, WatchedManager):
            self.manager.check_kept(lambda owner: self.scheduler.request(owner) is not None)

    def audit(self) -> int:
        """Everything the tree calls READY is right; and what is free is filled with garbage, so
        that whoever still uses it is found out."""
        ranks = self.workers.alive
        for component in self.manager.components:
            for tier in Tier:
                allocator = inspect(self.manager).allocators[component.index * len(Tier) + tier]
                free = sorted(allocator.free_pages().tolist())
                for rank in ranks:
                    self.pools.scribble(rank, tier, free, component.name)
        self._world.apart.check(self.manager, self._world.stores)
        return audit(self.manager, self._world.oracle, self.pools, ranks)

    def kill(self) -> None:
        self.alive = False
        self.workers.kill()
        self._world.servers.pop(self.epoch, None)
        self.exchange.hub.close()
        self.count()

    def calm(self) -> None:
        self.faults.active = False
        self.latency.slow_share = self.latency.stuck_share = 0.0

    @property
    def idle(self) -> bool:
        quiet = self.manager.idle and self.workers.next_event_s() is None
        return quiet and not len(self.scheduler) and not self.exchange.busy

    def wakeups(self) -> list[float]:
        times = [
            self.workers.next_event_s(),
            self.manager.next_wakeup(),
            self.exchange.receiver.next_deadline(),
            self.exchange.giver.next_deadline(),
        ]
        return [time for time in times if time is not None]

    def check_nothing_left(self) -> None:
        """It has come to rest: everything must have come back."""
        name, manager, exchange = self.epoch, self.manager, self.exchange
        self.audit()
        left = {
            "leases": len(manager.leases),
            "operations": len(manager.operations.running),
            "requests": len(self.scheduler) + len(self.scheduler.holding),
            "hand-overs asked for": len(exchange.receiver.open) + exchange.receiver.num_asked,
            "hand-overs given": len(exchange.giver.open) + len(exchange.giver._outgoing),
            "grants": len(self.serving),
        }
        for what, count in left.items():
            if count:
                raise SimulationError(f"{name}: {count} {what} are left")
        for tier in (Tier.DEVICE, Tier.HOST):
            manager.flush(tier)
        for slot, allocator in enumerate(inspect(manager).allocators):
            if allocator.num_free != allocator.num_pages:
                missing = allocator.num_pages - allocator.num_free
                raise SimulationError(f"{name}: {missing} pages of slot {slot} never came back")
        manager.check_invariants()
        if inspect(manager).tree.roots:
            raise SimulationError(f"{name}: the tree is not empty although nothing is cached")

    # ---- counting -------------------------------------------------------------------------------

    def count(self) -> None:
        """Add what it has counted to the world's counters; once in its life."""
        counters, receiver = self._world.counters, self.exchange.receiver.counters
        for name, number in self.manager.counters.snapshot().items():
            counters[str(name)] += int(number)
        for name, number in self.scheduler.counters.snapshot().items():
            counters[f"scheduler {name}"] += int(number)
        for name, number in self.faults.injected.items():
            counters[f"fault {name}"] += number
        for reason, number in receiver.repairs.items():
            counters[f"repair {reason}"] += number
        for outcome, number in receiver.restores.items():
            counters[f"restore {outcome}"] += number
        counters["promised"] += receiver.promised_pages
        counters["restored"] += receiver.restored_pages
        counters["served"] += self.exchange.giver.served
        counters["checked pages"] += self.model.checked_pages
        counters["computed tokens"] += self.model.computed_tokens
        counters["accepted tokens"] += self.model.accepted_tokens
        counters["rejected tokens"] += self.model.rejected_tokens

    def _ended(self, handover: Handover) -> None:
        """Told of every hand-over that ends."""
        counters = self._world.counters
        kind = "handover" if handover.compute else "peers"
        counters[f"{kind} {handover.stage.value}"] += 1
        if handover.transfer is Half.FAILED:
            counters["handover local"] += 1
            self._local.add(handover.owner)
            self._newly_local.append(handover)
        if handover.stage is Stage.READY and handover.wanted:
            if handover.compute and not handover.tries:
                counters["handover all local"] += 1
            if handover.received:
                counters[f"{kind} received"] += 1
            if handover.tries > 1:
                counters[f"{kind} failed over"] += 1
            if handover.compute and handover.restored and handover.received:
                counters["handover of both halves"] += 1


_PARTS = ("node", "faults", "latency", "workers", "drafts", "model")
