"""SimClients: people in conversations, and the router between them and the engines.

Every call has one right answer, known beforehand. A call goes to an engine; when that dies, or
says that it cannot, it goes to another, as often as need be. Knows engines only by what they say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from quire.engine.messages import AbortRequest, Finish, Generate, Output, SamplingParams
from quire.keys import Namespace, UnitKind
from quire.sim.pd.model import answer
from quire.sim.pd.sim_node import DTYPE, FINGERPRINT, SimNode, World
from quire.sim.report import SimulationError
from quire.sim.workload import ARRIVING_TOGETHER, SimPrompt, Workload
from quire.types import RequestId

_ARRIVAL_CHANCE = 0.4
_HASTY_SHARE = 0.03
"""Calls that are given up by a deadline of their own."""
_NOBODY = RequestId("")


@dataclass(slots=True, eq=False)
class ClientCall:
    prompt: SimPrompt
    tokens: list[int]
    expected: list[int]
    began_s: float
    timeout_s: float
    got: list[int] = field(default_factory=list)
    node: SimNode | None = None
    """Who works at it."""
    id: RequestId = _NOBODY
    """Of this attempt."""
    sent_s: float = 0.0
    was_full: bool = False
    """Who works at it had no room when it was sent."""
    attempts: int = 0
    retry_s: float = 0.0
    told_s: float | None = None
    """When its first token came."""


SimRoute = Callable[[ClientCall, list[SimNode]], tuple[SimNode, list[str]]]
"""Of those that take calls the one for this call, and whom that is to ask for pages; nobody: whom
it knows."""


class SimClients:
    def __init__(self, world: World, rng: Random, route: SimRoute | None = None) -> None:
        """`route`: instead of any of them."""
        options = world.options
        self._world = world
        self._rng = rng
        self._route = route or self._any
        self.namespaces = [
            Namespace(FINGERPRINT, DTYPE, options.page_size, salt=salt) for salt in ("", "tenant")
        ]
        for namespace in self.namespaces:
            for unit in UnitKind:  # whoever answers
                world.oracle.register(replace(namespace, unit=unit))
        self._workload = Workload(rng, options.engine(1), self.namespaces)
        self.calls: list[ClientCall] = []
        self._by_id: dict[RequestId, ClientCall] = {}
        self._aborted: set[RequestId] = set()
        self._num_sent = 0

    def step(self, nodes: list[SimNode]) -> None:
        """`nodes`: those that take calls, and are alive."""
        rng, options = self._rng, self._world.options
        if options.arrivals:
            if rng.random() < options.arrivals:
                prompt = self._workload.next_prompt()
                for _ in range(rng.choice(ARRIVING_TOGETHER)):
                    self.arrive(prompt)
        elif len(self.calls) < options.concurrency and rng.random() < _ARRIVAL_CHANCE:
            self.arrive(self._workload.next_prompt())
        self.send(nodes)
        if self.calls and rng.random() < options.abort_rate:
            self._abort(rng.choice(self.calls))

    def send(self, nodes: list[SimNode]) -> None:
        """Send what is not with anybody; see that nobody is kept waiting for ever."""
        now, patience_s = self._world.clock(), self._world.options.patience_s
        for call in self.calls:
            if call.node is not None and not call.node.alive:
                self._count("lost with its engine")
                self._take_back(call, 0.1)
            if call.node is None and now >= call.retry_s and nodes:
                self._send(call, *self._route(call, nodes))
            elif call.node is not None and now - call.sent_s > patience_s:
                raise SimulationError(self._about(call))

    def hear(self, node: SimNode, outputs: list[Output]) -> None:
        for output in outputs:
            call = self._by_id.get(output.id)
            if output.id in self._aborted and output.finish is Finish.REJECTED:
                continue  # it was said before
            if call is None or call.node is not node:
                raise SimulationError(f"{output.id}: an answer that nobody waits for: {output}")
            call.got += output.tokens
            if call.told_s is None and call.got:
                call.told_s = self._world.clock()
            if call.got != call.expected[: len(call.got)]:
                raise SimulationError(f"{output.id} answered {call.got} instead of {call.expected}")
            if output.finish is not None:
                self._check_failure(call, output)
                self._finished(call, output)

    # ---- inside ---------------------------------------------------------------------------------

    def _check_failure(self, call: ClientCall, output: Output) -> None:
        """Only who has no room may turn anybody away."""
        if output.finish is Finish.REJECTED and not call.was_full:
            raise SimulationError(f"{call.id} was rejected by one that has room: {output.error}")

    def arrive(self, prompt: SimPrompt, *, is_patient: bool = False) -> ClientCall:
        """Somebody asks this, and waits for the answer, however long if `is_patient`."""
        rng, now = self._rng, self._world.clock()
        tokens = list(prompt.tokens) or [0]
        options = self._world.options
        count = rng.randrange(1, 2 * options.page_size + 2 + 2 * options.drafts)
        namespace = prompt.session.namespace
        expected = answer(self._world.oracle, namespace, tokens, count)
        is_hasty = not is_patient and rng.random() < _HASTY_SHARE
        timeout_s = rng.uniform(0.1, 3.0) if is_hasty else 3600.0
        self._count("arrived")
        call = ClientCall(prompt, tokens, expected, now, timeout_s)
        self.calls.append(call)
        return call

    def _any(self, _call: ClientCall, nodes: list[SimNode]) -> tuple[SimNode, list[str]]:
        node = self._rng.choice(nodes)
        if node.place.prefill and self._rng.random() < 0.3:  # the router knows better
            return node, self._rng.sample(node.place.prefill, len(node.place.prefill))
        return node, []

    def _send(self, call: ClientCall, node: SimNode, prefill: list[str]) -> None:
        self._num_sent += 1
        call.attempts += 1
        call.id = RequestId(f"r{self._num_sent}")
        call.node, call.got, call.sent_s = node, [], self._world.clock()
        call.was_full = node.scheduler.is_full
        self._by_id[call.id] = call
        params = SamplingParams(max_tokens=len(call.expected), temperature=0.0)
        tokens = np.asarray(call.tokens, dtype="<i4").tobytes()
        node.engine.handle(
            Generate(
                call.id,
                tokens,
                params,
                call.prompt.session.namespace.salt,
                call.prompt.priority,
                call.timeout_s,
                prefill,
            )
        )

    def _finished(self, call: ClientCall, output: Output) -> None:
        world = self._world
        self._count(f"finish {output.finish.value if output.finish else ''}")
        match output.finish:
            case Finish.LENGTH:
                if call.got != call.expected:
                    raise SimulationError(f"{call.id}: only {call.got} of {call.expected}")
                self._count("finished after a failure", call.attempts > 1)
                self._workload.finished(call.prompt, call.tokens + call.got)
                self._end(call)
            case Finish.REJECTED:
                if world.options.is_calm:
                    raise SimulationError(f"{call.id} was refused without need: {output.error}")
                self._take_back(call, self._rng.uniform(0.1, 1.0))
            case Finish.TIMEOUT if call.timeout_s < world.options.patience_s:
                self._end(call)
            case _:
                raise SimulationError(f"{call.id}: {output}")

    def _abort(self, call: ClientCall) -> None:
        if call.node is not None and call.node.alive:
            self._count(f"aborted while {_stage(call)}")
            call.node.engine.handle(AbortRequest(call.id))
            self._aborted.add(call.id)
        self._end(call)

    def _take_back(self, call: ClientCall, pause_s: float) -> None:
        self._by_id.pop(call.id, None)
        call.node = None
        call.retry_s = self._world.clock() + pause_s

    def _end(self, call: ClientCall) -> None:
        self._by_id.pop(call.id, None)
        self.calls.remove(call)

    def _count(self, what: str, number: int = 1) -> None:
        self._world.counters[what] += number

    def _about(self, call: ClientCall) -> str:
        assert call.node is not None
        statuses = [s for s in call.node.engine.requests().requests if s.id == call.id]
        waited = self._world.clock() - call.sent_s
        return f"{call.id} hangs at {call.node.epoch} for {waited:.0f} s: {statuses}"


def _stage(call: ClientCall) -> str:
    assert call.node is not None
    request = call.node.scheduler.request(call.id)
    if request is None:
        return "unknown"
    if request.handover is not None:
        return request.handover.stage.value
    return request.state.name.lower()
