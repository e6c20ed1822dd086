"""simulate_pd(): one seeded run of a cluster of real engines over simulated hands and lines.

Same seed, same steps, same options: same run, to the last message.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random

from quire.engine.config import Role
from quire.keys import UnitKind
from quire.progress import Ticks
from quire.sim.apart import Apart
from quire.sim.bandwidth import SimLinks
from quire.sim.clock import VirtualClock
from quire.sim.content import Oracle
from quire.sim.drive import drive
from quire.sim.network import NetworkTrouble, SimNetwork
from quire.sim.options import UnitMix
from quire.sim.pd.client import SimClients, SimRoute
from quire.sim.pd.health import ALL, ClusterHealth, line
from quire.sim.pd.options import SimPdOptions, Topology
from quire.sim.pd.report import PdReport
from quire.sim.pd.sim_node import NodePlace, SimNode, World
from quire.sim.peers import LineState
from quire.sim.report import SimulationError
from quire.sim.store import SimStores
from quire.types import Tier

_AUDIT_EVERY = 8
_STEP_S = 0.015
_MAX_LEAP_S = 8.0
_MAX_TROUBLE_S = 6.0
_MAX_DRAIN_STEPS = 20_000
_QUIET_TURNS = 3


def simulate_pd(
    seed: int,
    steps: int,
    options: SimPdOptions | None = None,
    *,
    progress: Ticks | None = None,
) -> PdReport:
    """Run `steps` turns of engines, drain, and report. Raises SimulationError at the first broken
    rule."""
    chosen = options or SimPdOptions.from_seed(seed)
    run = PdSimulation(seed, chosen)
    return drive(
        run, chosen, seed=seed, steps=steps, step=lambda _at: run.step(), progress=progress
    )


class PdSimulation:
    """The parts of one run, wired together. A step is one turn of one engine."""

    def __init__(self, seed: int, options: SimPdOptions, route: SimRoute | None = None) -> None:
        """`route`: how calls find their engines; None: any way."""
        self.options = options
        self.clock = VirtualClock()
        self._digest = blake2b(digest_size=8)
        self._rng = Random(f"{seed} driver")
        trouble = NetworkTrouble(options.duplicated, options.reordered, options.delayed)
        health = ClusterHealth(self.clock)
        network = SimNetwork(
            self.clock,
            Random(f"{seed} network"),
            trouble,
            self._trace,
            lambda one, other, seconds: health.disturbed(line(one, other), seconds),
        )
        stores, links = SimStores(options.store_pages), SimLinks(self.clock, options.link_pages_s)
        oracle = Oracle()
        self.world = World(
            seed,
            options,
            self.clock,
            oracle,
            Apart(oracle),
            network,
            stores,
            links,
            health,
            self._trace,
        )
        self.clients = SimClients(self.world, Random(f"{seed} clients"), route)
        self._lives = 0
        self._steps = 0
        self._quiet_turns = 0
        self._missing: list[tuple[float, NodePlace]] = []
        """Engines that are gone, and when a fresh one comes."""
        self.nodes = [self._start(place) for place in _places(options, self._rng)]

    def step(self) -> None:
        """Clients, trouble, time, and one engine's turn."""
        self.clients.step(self.takers())
        self._make_trouble()
        self.clock.advance(_STEP_S * self._rng.expovariate(1.0))
        if self._rng.random() < self.options.leap_rate:
            self.clock.advance(self._rng.uniform(0.5, _MAX_LEAP_S))
            self.world.health.disturbed(ALL)
        self._come_back()
        self.happen()
        if self.nodes:
            self._turn(self._rng.choice(self.nodes))

    def drain(self) -> None:
        """No new calls, no new trouble: everything must be answered, and everything come back."""
        self.world.is_calm = True
        self.world.network.heal()
        for node in self.nodes:
            node.calm()
        num_calls, began = len(self.clients.calls), 0
        for at in range(_MAX_DRAIN_STEPS):
            self._come_back(at_once=True)
            self.clients.send(self.takers())
            if self.options.arrivals and len(self.clients.calls) < num_calls:
                num_calls, began = len(self.clients.calls), at  # many wait, and all goes on
            self._sleep(_STEP_S * (1 + (at - began) / 100))  # something may be stuck, for long
            self.happen()
            for node in self.nodes:
                self._turn(node)
            self._check_nobody_is_forgotten()
            if self._is_quiet():
                break
        else:
            raise SimulationError(f"it never came to rest: {self._unfinished()}")
        for node in self.nodes:
            node.check_nothing_left()

    def report(self, seed: int, steps: int) -> PdReport:
        counters = self.world.counters
        for node in self.nodes:
            node.count()
        counters.update(self.world.stores.counters())
        counters.update({f"network {k}": n for k, n in self.world.network.counters.items()})
        found = {name: counters[name] for name in sorted(counters) if counters[name]}
        return PdReport(seed, steps, self.options, self.clock(), self._digest.hexdigest(), found)

    # ---- inside ---------------------------------------------------------------------------------

    def _trace(self, data: bytes) -> None:
        self._digest.update(repr(self.clock()).encode())
        self._digest.update(data)

    def _start(self, place: NodePlace) -> SimNode:
        self._lives += 1
        node = SimNode(self.world, place, self._lives)
        if self.world.is_calm:
            node.calm()
        return node

    def takers(self) -> list[SimNode]:
        return [node for node in self.nodes if node.place.role is not Role.PREFILL]

    def _turn(self, node: SimNode) -> None:
        self.clients.hear(node, node.step())
        self._steps += 1
        node.check(self._steps)
        node.check_local(self.nodes)
        if self._steps % _AUDIT_EVERY == 0:
            self.world.counters["audited pages"] += node.audit()

    def happen(self) -> None:
        """Whatever is due by now happens, wherever it does."""
        self.world.network.advance()
        for node in self.nodes:
            node.workers.advance()

    def _make_trouble(self) -> None:
        rng, options, world = self._rng, self.options, self.world
        if rng.random() < options.kill_rate and self.nodes:
            self._kill(rng.choice(self.nodes))
        for how, rate in (
            (LineState.CUT, options.cut_rate),
            (LineState.STALLED, options.stall_rate),
        ):
            if rng.random() < rate and len(self.nodes) > 1:
                one, other = rng.sample(self.nodes, 2)
                seconds = rng.uniform(0.05, rng.choice((0.5, _MAX_TROUBLE_S)))
                world.network.disturb(one.place.address, other.place.address, how, seconds)
        if rng.random() < options.forget_rate:
            world.counters["forgotten"] += world.stores.forget(rng, rng.randrange(1, 6))
        if rng.random() < options.evict_rate and self.nodes:
            rng.choice(self.nodes).manager.flush(rng.choice(list(Tier)))

    def _kill(self, node: SimNode) -> None:
        self.world.counters["killed"] += 1
        self.world.counters[f"killed {node.place.role.value}"] += 1
        node.kill()
        self.nodes.remove(node)
        pause_s = self._rng.choice((0.0, self._rng.uniform(0.0, 5.0)))
        self._missing.append((self.clock() + pause_s, node.place))

    def _come_back(self, *, at_once: bool = False) -> None:
        now = self.clock()
        due = [entry for entry in self._missing if at_once or entry[0] <= now]
        for entry in due:
            self._missing.remove(entry)
            self.nodes.append(self._start(entry[1]))

    def _sleep(self, turn_s: float) -> None:
        """Until something happens, or engines that have work would look again."""
        times = [t for node in self.nodes for t in node.wakeups()]
        event_s = self.world.network.next_event_s()
        times += [event_s] if event_s is not None else []
        times += [call.retry_s for call in self.clients.calls if call.node is None]
        if self.clients.calls or any(len(node.scheduler) for node in self.nodes):
            times.append(self.clock() + turn_s)
        if times:  # some of them may be past: it is the engines' turn, and that takes time too
            self.clock.advance_to(max(min(times), self.clock() + turn_s / 3))

    def _is_quiet(self) -> bool:
        if self.clients.calls or self.world.network.next_event_s() is not None:
            return False
        return all(n.idle and n.manager.next_wakeup() is None for n in self.nodes)

    def _check_nobody_is_forgotten(self) -> None:
        """With nobody asking and nothing under way, nothing may be held for anybody."""
        talking = self.world.network.next_event_s() is not None
        asking = any(node.exchange.receiver.open or node.hub.events for node in self.nodes)
        self._quiet_turns = 0 if talking or asking or self.clients.calls else self._quiet_turns + 1
        if self._quiet_turns > _QUIET_TURNS:
            for node in self.nodes:
                for link, name in node.exchange.giver.open:
                    raise SimulationError(f"{node.epoch} holds {name} of {link} for nobody")

    def _unfinished(self) -> str:
        found = [f"{len(self.clients.calls)} calls"]
        for node in self.nodes:
            operations = [str(op.kind) for op in node.manager.operations.running.values()]
            requests = [f"{s.id} {s.state} {s.handover}" for s in node.engine.requests().requests]
            asked, given = node.exchange.receiver.open, node.exchange.giver.open
            found.append(
                f"{node.epoch}: operations {operations}, requests {requests}, "
                f"asked {len(asked)}, given {list(given)}, idle {node.idle}"
            )
        return "\n    ".join(found)


def _places(options: SimPdOptions, rng: Random) -> list[NodePlace]:
    """In BOTH there are as many engines again that count in pairs; all of them share a store."""
    units = {
        UnitMix.TOKEN: (UnitKind.TOKEN,),
        UnitMix.PAIR: (UnitKind.PAIR,),
        UnitMix.BOTH: (UnitKind.TOKEN, UnitKind.PAIR),
    }[options.units]
    return [place for unit in units for place in _places_of(unit, options, rng)]


def _places_of(unit: UnitKind, options: SimPdOptions, rng: Random) -> list[NodePlace]:
    kind = "" if unit is UnitKind.TOKEN else "pair-"
    if options.topology is Topology.PEERS:
        names = [f"{kind}unified{i}" for i in range(options.decodes)]
        places = []
        for name in names:
            others = [f"tcp://{other}:1" for other in names if other != name]
            rng.shuffle(others)
            ranks = options.decode_ranks
            places.append(NodePlace(name, Role.UNIFIED, ranks, unit, peers=tuple(others)))
        return places
    prefills = [
        NodePlace(f"{kind}prefill{i}", Role.PREFILL, options.prefill_ranks, unit)
        for i in range(options.prefills)
    ]
    addresses = [place.address for place in prefills]
    decodes = []
    for i in range(options.decodes):
        order, name = tuple(rng.sample(addresses, len(addresses))), f"{kind}decode{i}"
        decodes.append(NodePlace(name, Role.DECODE, options.decode_ranks, unit, prefill=order))
    return prefills + decodes
