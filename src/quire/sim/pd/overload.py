"""overload(): more is offered to a cluster than its lines carry, for a while; what becomes of it?

Real engines over simulated hands and lines (quire.sim.pd), and the router's own choice between
them. Sessions come at their own pace, whoever waits; each asks once, with a prompt that nobody has
cached. Nothing is broken: what is short is what the lines carry.

    sessions come (`seconds`)            no more come
    ├──────────── `times` × the lines ──────────┤───────── all is answered ─────────▶
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from quire.engine.config import Role
from quire.router.choose import Candidate, rank
from quire.sim.pd.client import ClientCall
from quire.sim.pd.fair import SessionWait, in_equal_parts, in_order
from quire.sim.pd.options import OVERLOAD_PAGE_SIZE, OverloadOptions
from quire.sim.pd.run import PdSimulation
from quire.sim.pd.sim_node import SimNode
from quire.sim.report import SimulationError
from quire.sim.workload import ALPHABET, Session, SimPrompt

LEAST_GOODPUT, MOST_UNFAIR = 0.8, 3.0
_ALONE_TURNS, _ALONE_TURNS_A_PAGE = 12, 0.5
"""Of engines, that a session takes in an empty cluster beside its time on the line: measured over
prompts of 4, 20 and 48 pages, of which the simulated hands copy one after the other."""
_LOOK_EVERY = 101
"""Turns of an engine from one look at all its pages to the next."""


@dataclass(slots=True, eq=False)
class _Asked:
    call: ClientCall
    num_pages: int
    decode: str = ""
    """Who was the first to be asked for it."""


@dataclass(frozen=True, slots=True)
class OverloadReport:
    options: OverloadOptions
    offered_pages: int
    moved_pages: int
    """While sessions came: those that count, each once."""
    sent_pages: int
    """In all, whether they counted or not."""
    received_pages: int
    """In all."""
    link_pages_s: float
    """Of all decode engines together."""
    clear_s: float
    """When the last was answered."""
    waits: list[SessionWait]
    counters: dict[str, int]

    @property
    def goodput(self) -> float:
        """Share of what the lines could have carried while sessions came."""
        return self.moved_pages / (self.link_pages_s * self.options.seconds)

    @property
    def goodput_to_the_end(self) -> float:
        return self.received_pages / (self.link_pages_s * self.clear_s)

    @property
    def longest(self) -> SessionWait:
        return max(self.waits, key=lambda wait: wait.seconds)

    @property
    def most_unfair(self) -> SessionWait:
        return max(self.waits, key=lambda wait: wait.ratio)

    @property
    def unfairness(self) -> float:
        """The longest wait, as a multiple of the longest if all went in the order of coming."""
        return self.longest.seconds / max(wait.in_order_s for wait in self.waits)

    @property
    def holds(self) -> bool:
        """Nothing has collapsed, and nobody was starved."""
        is_fair = max(self.unfairness, self.most_unfair.ratio) <= MOST_UNFAIR
        return is_fair and self.goodput >= LEAST_GOODPUT

    def rows(self) -> list[tuple[str, str]]:
        options, unfair = self.options, self.most_unfair
        offered_s = self.offered_pages / options.seconds
        repaired = {k[7:]: n for k, n in self.counters.items() if k.startswith("repair ")}
        median = sorted(wait.seconds for wait in self.waits)[len(self.waits) // 2]
        return [
            ("engines", f"{options.prefills} prefill, {options.decodes} decode"),
            ("sessions", f"{len(self.waits):,} answered of {options.sessions:,}"),
            ("offered", f"{offered_s:,.0f} pages/s for {options.seconds:g} s"),
            ("the lines carry", f"{self.link_pages_s:,.0f} pages/s"),
            ("offered / carried", f"{offered_s / self.link_pages_s:.2f}"),
            ("goodput meanwhile", f"{self.goodput:.1%} of the lines"),
            ("goodput to the end", f"{self.goodput_to_the_end:.1%} of the lines"),
            ("pages sent / received", f"{self.sent_pages:,} / {self.received_pages:,}"),
            ("wait, median / longest", f"{median:.1f} s / {self.longest.seconds:.1f} s"),
            ("longest / longest in order", f"{self.unfairness:.2f}"),
            ("least fair of all", f"{unfair.seconds:.1f} s, {unfair.ratio:.2f} × its fair wait"),
            ("all answered after", f"{self.clear_s:.1f} s"),
            ("ideally after", f"{self.offered_pages / self.link_pages_s:.1f} s"),
            ("refused", f"{self.counters.get('finish rejected', 0):,}"),
            ("computed by decode", f"{self.counters.get('handover local', 0):,}"),
            ("pages asked again", ", ".join(f"{k} {n:,}" for k, n in repaired.items()) or "-"),
        ]


def overload(
    seed: int,
    options: OverloadOptions | None = None,
    *,
    progress: Callable[[float, int], None] = lambda _now_s, _answered: None,
) -> OverloadReport:
    """`progress` hears the virtual time and how many are answered. Raises SimulationError if a rule
    is broken, or it does not clear."""
    return _Overload(seed, options or OverloadOptions()).run(progress)


@dataclass(slots=True)
class _Router:
    """The router's own choice, by the number of requests at each; nobody has anything cached."""

    prefills: list[str] = field(default_factory=list)
    asked: Callable[[ClientCall, SimNode, str], None] = lambda _call, _node, _prefill: None
    load: Counter[str] = field(default_factory=Counter)
    _turns: Iterator[int] = field(default_factory=itertools.count)

    def route(self, call: ClientCall, nodes: list[SimNode]) -> tuple[SimNode, list[str]]:
        by_name = {node.place.name: node for node in nodes}
        node = by_name[self._rank(list(by_name))[0]]
        prefills = self._rank(self.prefills)
        self.asked(call, node, prefills[0])
        return node, list(prefills)

    def _rank(self, names: list[str]) -> tuple[str, ...]:
        candidates = [Candidate(name, self.load[name]) for name in names]
        return rank(candidates, 0, next(self._turns)).names


class _Overload:
    def __init__(self, seed: int, options: OverloadOptions) -> None:
        self.options = options
        self._rng = Random(f"{seed} overload")
        self._router = _Router()
        self._sim = PdSimulation(seed, options.cluster(), self._router.route)
        self._router.asked = self._sent
        self._router.prefills = [
            node.place.address for node in self._sim.nodes if node.place.role is Role.PREFILL
        ]
        self._asked: dict[ClientCall, _Asked] = {}
        self._untold: dict[ClientCall, str] = {}
        """Calls without a first token: the prefill engine that is busy with each."""
        self._unanswered: dict[ClientCall, str] = {}
        self._turns = 0

    def run(self, progress: Callable[[float, int], None]) -> OverloadReport:
        options, sim = self.options, self._sim
        come_s = sorted(self._rng.uniform(0.0, options.seconds) for _ in range(options.sessions))
        at, moved = 0, 0
        while at < len(come_s) or sim.clients.calls:
            now = sim.clock()
            while at < len(come_s) and come_s[at] <= now:
                self._come()
                at += 1
            if now <= options.seconds:
                moved = self._received()
            if now > options.cluster().patience_s:
                raise SimulationError(f"{len(sim.clients.calls)} are not answered after {now:g} s")
            sim.clients.send(sim.takers())
            sim.clock.advance(options.turn_s)
            sim.happen()
            for node in sim.nodes:
                self._turn(node)
            self._note_answers()
            progress(now, at - len(sim.clients.calls))
        clear_s = sim.clock()
        received, sent = self._received(), sim.world.links.num_pages
        sim.drain()
        return OverloadReport(
            options,
            sum(asked.num_pages for asked in self._asked.values()),
            moved,
            sent,
            received,
            options.link_pages_s * options.decodes,
            clear_s,
            self._waits(),
            sim.report(0, 0).counters,
        )

    def _come(self) -> None:
        rng, options = self._rng, self.options
        num_pages = rng.randint(options.least_pages, options.most_pages)
        tokens = tuple(rng.randrange(ALPHABET) for _ in range(num_pages * OVERLOAD_PAGE_SIZE + 1))
        session = Session(self._sim.clients.namespaces[0], [])
        call = self._sim.clients.arrive(SimPrompt(session, tokens, 0, None), is_patient=True)
        self._asked[call] = _Asked(call, num_pages)

    def _sent(self, call: ClientCall, node: SimNode, prefill: str) -> None:
        asked, name = self._asked[call], node.place.name
        asked.decode = asked.decode or name
        self._untold[call], self._unanswered[call] = prefill, name
        self._router.load.update((prefill, name))

    def _note_answers(self) -> None:
        """Who has been told something needs no prefill engine; who is answered, none at all."""
        for call in [call for call in self._untold if call.told_s is not None]:
            self._router.load[self._untold.pop(call)] -= 1
        for call in [call for call in self._unanswered if call.got == call.expected]:
            self._router.load[self._unanswered.pop(call)] -= 1

    def _turn(self, node: SimNode) -> None:
        self._sim.clients.hear(node, node.step())
        self._turns += 1
        if self._turns % _LOOK_EVERY == 0:
            node.manager.check_invariants()
            node.audit()

    def _received(self) -> int:
        return sum(node.manager.counters.received_pages for node in self._sim.nodes)

    def _waits(self) -> list[SessionWait]:
        lines: dict[str, list[_Asked]] = defaultdict(list)
        for asked in self._asked.values():
            lines[asked.decode].append(asked)
        found = []
        for line in lines.values():
            loads = [(a.call.began_s, a.num_pages / self.options.link_pages_s) for a in line]
            ends = zip(line, in_order(loads), in_equal_parts(loads), strict=True)
            for asked, in_order_s, in_parts_s in ends:
                began_s, told_s = asked.call.began_s, asked.call.told_s
                assert told_s is not None
                line_s = max(in_order_s, in_parts_s) - began_s
                turns = _ALONE_TURNS + _ALONE_TURNS_A_PAGE * asked.num_pages
                alone_s = turns * self.options.turn_s
                found.append(SessionWait(told_s - began_s, in_order_s - began_s, line_s, alone_s))
        return found
