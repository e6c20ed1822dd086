"""simulate(): one seeded run of the real manager over simulated workers, checked at every step.

Same seed, same steps, same options: same run, to the last message. All randomness comes from
generators seeded here, all time from the virtual clock.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random

from quire.manager import CacheManager, Way
from quire.manager.inspection import inspect
from quire.messages import encode
from quire.progress import Ticks
from quire.sim.apart import Apart
from quire.sim.audit import EventMirror, audit
from quire.sim.clock import VirtualClock
from quire.sim.compute import Compute
from quire.sim.content import Oracle, Pools
from quire.sim.drive import drive
from quire.sim.engine import SimEngine
from quire.sim.faults import RandomFaults
from quire.sim.latency import Latency
from quire.sim.operator import Operator
from quire.sim.options import SimOptions
from quire.sim.report import SimReport, SimulationError
from quire.sim.store import SimStores
from quire.sim.watch import WatchedManager
from quire.sim.workers import SimWorkers
from quire.sim.workload import ARRIVING_TOGETHER, Workload
from quire.types import Tier

_AUDIT_EVERY = 8
_STEP_S = 0.03
_LEAP_CHANCE = 0.01
_MAX_LEAP_S = 20.0
"""A scheduler that was held up: everything due meanwhile is met at once."""
_MAX_DRAIN_STEPS = 5_000


def simulate(
    seed: int,
    steps: int,
    options: SimOptions | None = None,
    *,
    progress: Ticks | None = None,
) -> SimReport:
    """Run `steps` steps, drain, and report. Raises SimulationError at the first broken rule."""
    chosen = options or SimOptions.from_seed(seed)
    run = Simulation(seed, chosen)

    def step(at: int) -> None:
        if chosen.lose_rank and at == steps * 2 // 3:
            run.lose_a_rank()
        run.step()

    return drive(run, chosen, seed=seed, steps=steps, step=step, progress=progress)


class Simulation:
    """The parts of one run, wired together."""

    def __init__(self, seed: int, options: SimOptions) -> None:
        # One generator per part: what one of them draws does not shift the others.
        rngs = {name: Random(f"{seed} {name}") for name in _PARTS}
        self.options = options
        self.clock = VirtualClock()
        manager = WatchedManager if options.strict else CacheManager
        self.manager = manager(
            options.cache_config(), clock=self.clock, components=options.components()
        )
        self.manager.costs.force(Way.BOTH if options.both else None)
        self.pools = Pools(options.ranks, options.pool_sizes())
        self.oracle = Oracle()
        self.apart = Apart(self.oracle)
        self.stores = SimStores(options.store_pages)
        self._rng = rngs["driver"]
        weights = [self._rng.choice((0.2, 1.0, 2.0)) for _ in range(options.ranks)]
        self.faults = RandomFaults(rngs["faults"], options.fault_rate, weights)
        self.latency = Latency(
            rngs["latency"],
            [self._rng.choice((0.3, 1.0, 4.0)) for _ in range(options.ranks)],
            slow_share=options.slow_share,
            stuck_share=options.stuck_share,
        )
        self.workers = SimWorkers(
            self.pools,
            self.stores,
            clock=self.clock,
            faults=self.faults,
            latency=self.latency,
            rng=rngs["workers"],
            lane_pages_s=options.lane_pages_s,
        )
        workload = Workload(rngs["workload"], options)
        for namespace in workload.namespaces:
            self.oracle.register(namespace)
        compute = Compute(self.manager, self.pools, self.workers, options.window_pages)
        self.engine = SimEngine(
            self.manager,
            compute,
            self.oracle,
            workload,
            self.clock,
            rngs["engine"],
            options.drafts,
        )
        self.operator = Operator(self.manager, self.stores, self.clock, rngs["operator"])
        self.mirror = EventMirror()
        self._steps = 0
        self._digest = blake2b(digest_size=8)
        self.operator.attach()

    def step(self) -> None:
        """One turn of the scheduler loop: requests, trouble, time, messages, checks."""
        engine, rng = self.engine, self._rng
        if self.options.arrivals:
            if rng.random() < self.options.arrivals:
                engine.arrive(together=rng.choice(ARRIVING_TOGETHER))
        elif len(engine.requests) < self.options.concurrency and rng.random() < 0.5:
            engine.arrive()
        for request in list(engine.requests):
            if rng.random() < 0.7:
                engine.advance(request)
        if engine.requests and rng.random() < self.options.abort_rate:
            engine.abort(rng.choice(engine.requests))
        self.operator.tend()
        if rng.random() < self.options.admin_rate:
            self.operator.act()
        self.clock.advance(_STEP_S * rng.expovariate(1.0))
        if rng.random() < _LEAP_CHANCE:
            self.clock.advance(rng.uniform(1.0, _MAX_LEAP_S))
        self._exchange()

    def lose_a_rank(self) -> None:
        self.workers.lose(self._rng.choice(self.workers.alive), "simulated death")

    def drain(self) -> None:
        """No new requests, no new trouble: everything must finish, and everything come back."""
        self.faults.active = False
        self.latency.slow_share = self.latency.stuck_share = 0.0
        for _ in range(_MAX_DRAIN_STEPS):
            for request in list(self.engine.requests):
                self.engine.advance(request)
            self._sleep_until_something_happens()
            self._exchange()
            quiet = self.manager.idle and self.workers.next_event_s() is None
            if quiet and not self.engine.requests and self.manager.next_wakeup() is None:
                break
        else:
            raise SimulationError(f"it never came to rest: {self._unfinished()}")
        self._check_nothing_left()

    def report(self, seed: int, steps: int) -> SimReport:
        return SimReport(
            seed=seed,
            steps=steps,
            options=self.options,
            virtual_s=self.clock(),
            digest=self._digest.hexdigest(),
            tally=self.engine.tally,
            counters={str(name): n for name, n in self.manager.counters.snapshot().items()}
            | self.stores.counters(),
            faults=dict(sorted(self.faults.injected.items())),
        )

    # ---- inside ---------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Reports in, commands out; then everything must be consistent."""
        reports = self.workers.poll()
        commands = self.manager.step(reports)
        if reports or commands:
            self._digest.update(repr(self.clock()).encode())
            self._digest.update(encode(reports))
            self._digest.update(encode(commands))
        self.workers.submit(commands)
        self._steps += 1
        if self._steps % self.options.check_every == 0:
            self.manager.check_invariants()
        if isinstance(self.manager, WatchedManager):
            alive = {request.id for request in self.engine.requests}
            self.manager.check_kept(alive.__contains__)
        self.operator.check_changes()
        if self._steps % _AUDIT_EVERY == 0:
            self._audit()

    def _audit(self) -> None:
        self.apart.check(self.manager, self.stores)
        ranks = self.workers.alive
        self.engine.tally.audited_pages += audit(self.manager, self.oracle, self.pools, ranks)
        if self.options.events:
            self.mirror.follow(self.manager)
            self.mirror.compare(self.manager)

    def _sleep_until_something_happens(self) -> None:
        times = [self.workers.next_event_s(), self.manager.next_wakeup()]
        waiting = [t for t in times if t is not None]
        if self.engine.requests:  # a prefetch may be waited for until its own deadline
            waiting.append(self.clock() + 5 * _STEP_S)
        if waiting:
            self.clock.advance_to(min(waiting))

    def _unfinished(self) -> str:
        running = [f"{op.kind} {op.id}" for op in self.manager.operations.running.values()]
        requests = [f"{r.id} {r.state.name}" for r in self.engine.requests]
        return f"operations {running}, requests {requests}"

    def _check_nothing_left(self) -> None:
        self._audit()
        if self.manager.leases:
            raise SimulationError(f"{len(self.manager.leases)} leases are left")
        for tier in (Tier.DEVICE, Tier.HOST):
            self.manager.flush(tier)
        for slot, allocator in enumerate(inspect(self.manager).allocators):
            if allocator.num_free != allocator.num_pages:
                missing = allocator.num_pages - allocator.num_free
                raise SimulationError(f"{missing} pages of slot {slot} never came back")
        self.manager.check_invariants()
        if inspect(self.manager).tree.roots:
            raise SimulationError("the tree is not empty although nothing is cached")


_PARTS = ("driver", "faults", "latency", "workers", "workload", "engine", "operator")
