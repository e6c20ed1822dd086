"""The connector's scheduler side over simulated workers: seeded, in virtual time, with ranks that
are slow, stuck and faulty. Blocks hold what they should, everything comes back, nothing loops."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from mini_vllm import BLOCK, MiniRequest, MiniVllm
from quire.integrations.vllm.accounts import Accounts
from quire.integrations.vllm.leader import Leader
from quire.integrations.vllm.orders import Orders, pack_reports, unpack_reports
from quire.keys import Namespace
from quire.manager.operations import OperationKind
from quire.messages import Completion
from quire.sim.content import Oracle, Pools
from quire.sim.faults import RandomFaults
from quire.sim.latency import Latency
from quire.sim.store import SimStores
from quire.sim.workers import SimWorkers
from quire.types import Tier, page_ids

NUM_REQUESTS = 60


NAMES = ("full", "window")
"""Of the groups, each a component."""


class SimMemory:
    """The engine's blocks on all ranks, as the simulator's device pages: of each group's layers its
    own. A block counts when it is full: what is not is never saved."""

    def __init__(self, pools: Pools, names: Iterable[str]) -> None:
        self.pools, self.oracle, self.names = pools, Oracle(), list(names)

    def compute(self, request: MiniRequest, group: int, first: int, last: int) -> None:
        full = range(first // BLOCK, last // BLOCK)
        contents, blocks = self._contents(request, last), request.blocks[group]
        mine = [blocks[at] for at in full], [contents[at] for at in full]
        self.pools.compute(*mine, NAMES[group])

    def check(self, request: MiniRequest, group: int, first: int, last: int) -> None:
        contents = self._contents(request, last)[first // BLOCK :]
        blocks = page_ids(request.blocks[group][first // BLOCK :][: len(contents)])
        ranks = range(self.pools.num_ranks)
        wrong = self.pools.first_wrong(Tier.DEVICE, blocks, contents, ranks, NAMES[group])
        assert wrong is None, f"{request.request_id} computes on a wrong block: {wrong}"

    def overwrite(self, blocks: list[int]) -> None:
        for name in self.names:
            self.pools.scribble_everywhere(blocks, name)

    def _contents(self, request: MiniRequest, num_tokens: int) -> list[int]:
        tokens = b"".join(t.to_bytes(4, "little") for t in request.all_token_ids[:num_tokens])
        namespace = Namespace("weights", "float32", BLOCK, salt=request.cache_salt or "")
        return self.oracle.pages(namespace, tokens)


class SimHands:
    """All ranks, and what vLLM makes of their accounts: done is what all of them have done."""

    def __init__(self, workers: SimWorkers, now: list[float], num_ranks: int) -> None:
        self._workers, self._now = workers, now
        self._ranks = [Accounts() for _ in range(num_ranks)]
        self._sent: list[set[str]] = [set() for _ in range(num_ranks)]
        self._received: list[set[str]] = [set() for _ in range(num_ranks)]
        self._failed: set[str] = set()
        self.accounts = self

    def obey(self, orders: Orders) -> None:
        for rank in self._ranks:
            commands = rank.begin(orders)
        self._workers.submit(commands)

    def look(self, *, idle: bool) -> None:
        self._poll()
        if idle and not any(rank.has_news for rank in self._ranks):
            self._wait()
            self._poll()

    def _poll(self) -> None:
        for report in self._workers.poll():
            self._ranks[report.rank].take([report])

    def finish_copies(self, orders: Orders) -> None:
        ops = None if orders.preempted else orders.taken
        while any(rank.is_copying(ops) for rank in self._ranks):
            self._wait()
            self.look(idle=False)

    def take_sent(self) -> set[str]:
        return _of_all(self._sent, [rank.take_sent() for rank in self._ranks])

    def take_received(self) -> tuple[set[str], set[str]]:
        """Failed is what one rank has failed to get."""
        news = [rank.take_received() for rank in self._ranks]
        self._failed.update(*(failed for _, failed in news))
        received = _of_all(self._received, [received for received, _ in news])
        failed = self._failed & received
        self._failed -= failed
        return received, failed

    def take_reports(self) -> bytes:
        found: list[Completion] = []
        for data in [rank.take_reports() for rank in self._ranks]:
            found += unpack_reports(data) if data else []
        return pack_reports(found) if found else b""

    def close(self) -> None:
        """Nothing is open."""

    def _wait(self) -> None:
        next_s = self._workers.next_event_s()
        self._now[0] = max(self._now[0], next_s if next_s is not None else self._now[0] + 0.01)


def _of_all(before: list[set[str]], news: list[set[str]]) -> set[str]:
    for known, more in zip(before, news, strict=True):
        known.update(more)
    done = set.intersection(*before)
    for known in before:
        known.difference_update(done)
    return done


def play(seed: int) -> MiniVllm:
    """Requests come, end, are aborted and preempted; the host is flushed, everything reset. Every
    other seed has windows."""
    rng = Random(seed)
    num_ranks, num_blocks = 1 + seed % 3, rng.choice((32, 64))
    host_pages = rng.choice((12, 40))
    now = [0.0]
    how: dict[str, Any] = {}
    if seed % 2:
        how = {"groups": ((0,), (1,)), "window": rng.choice((5, 8, 12))}
        num_blocks *= 2
    names = NAMES[: len(how.get("groups", "1"))]
    pools = Pools(num_ranks, dict.fromkeys(names, (num_blocks, host_pages)))
    workers = SimWorkers(
        pools,
        SimStores(rng.choice((0, 60))),
        clock=lambda: now[0],  # type: ignore[arg-type]
        faults=RandomFaults(Random(seed + 1), rng.choice((0.0, 0.05, 0.2)), [1.0] * num_ranks),
        latency=Latency(
            Random(seed + 2),
            [rng.choice((0.3, 1.0, 4.0)) for _ in range(num_ranks)],
            slow_share=rng.choice((0.0, 0.05)),
            stuck_share=rng.choice((0.0, 0.002)),
        ),
        rng=Random(seed + 3),
    )
    engine = MiniVllm(
        SimMemory(pools, names),
        SimHands(workers, now, num_ranks),
        num_blocks=num_blocks,
        host_pages=host_pages,
        num_ranks=num_ranks,
        store=rng.choice(("", "sim://one")),
        chunk=rng.choice((3, 8, 64)),
        save_tokens=rng.choice((4, 12)),
        now=now,
        **how,
    )
    for number in range(NUM_REQUESTS):
        words = Random(rng.randrange(6))
        tokens = [words.randrange(1000) for _ in range(rng.randint(2, 60))]
        salt = rng.choice((None, None, "x"))
        engine.add(MiniRequest(f"r{number}", tokens, rng.randint(1, 30), salt))
        for _ in range(rng.randrange(8)):
            engine.stalled.update(r.request_id for r in engine.running if rng.random() < 0.1)
            engine.step()
            now[0] += rng.expovariate(100.0)
            if engine.running and rng.random() < 0.1:
                engine.preempt(rng.choice(engine.running))
            live = engine.running + engine.waiting
            if live and rng.random() < 0.05:
                engine.abort(rng.choice(live))
            if rng.random() < 0.03:
                engine.manager.flush(Tier.HOST)
            if rng.random() < 0.02:
                engine.leader.reset()
            engine.manager.check_invariants()
    engine.run(limit=20_000)
    engine.manager.check_invariants()
    assert not engine.manager.leases
    assert len(engine.free) == len(set(engine.free)) == num_blocks - 1
    assert engine.num_recoveries <= NUM_REQUESTS, "each request is offered a load that fails once"
    return engine


@pytest.mark.parametrize(("store", "asked"), [("", 0), ("sim://one", 1)])
@pytest.mark.parametrize("window", [0, 12])
def test_a_new_prompt_costs_one_question_to_the_store_and_as_few_copies_as_can_be(
    store: str, asked: int, window: int
) -> None:
    """And no step more that computes than without a cache, whatever its length."""
    groups = ((0,), (1,)) if window else ((0,),)
    now, names = [0.0], NAMES[: len(groups)]
    pools = Pools(1, dict.fromkeys(names, (256, 200)))
    workers = SimWorkers(
        pools,
        SimStores(1000),
        clock=lambda: now[0],  # type: ignore[arg-type]
        faults=RandomFaults(Random(0), 0.0, [1.0]),
        latency=Latency(Random(0), [1.0], slow_share=0.0, stuck_share=0.0),
        rng=Random(0),
    )
    engine = MiniVllm(
        SimMemory(pools, names), SimHands(workers, now, 1), num_blocks=256, host_pages=200,
        store=store, chunk=64, save_tokens=256, now=now, window=window, groups=groups,
    )  # fmt: skip
    engine.add(MiniRequest("first", [1, 2, 3], 1))
    engine.run()
    for name, length in (("short", 40), ("long", 180)):
        request = MiniRequest(name, [(7 * at + length) % 1000 for at in range(length)], 8)
        before = {kind: done.count for kind, done in engine.manager.operations.ended.items()}
        engine.add(request)
        steps = 0
        while len(request.all_token_ids) < request.end:
            engine.step()
            steps += request not in engine.waiting
        engine.run()
        assert steps == -(-length // 64) + 7
        ended = engine.manager.operations.ended
        assert ended[OperationKind.PROBE].count - before[OperationKind.PROBE] == asked
        copies = ended[OperationKind.BACKUP].count - before[OperationKind.BACKUP]
        assert copies == (2 if window else 1), "with windows one more, at the end of the prompt"


@pytest.mark.parametrize("seed", range(24))
def test_whatever_the_workers_do_blocks_hold_what_they_should(seed: int) -> None:
    play(seed)


def play_all(seeds: Iterable[int]) -> list[MiniVllm]:
    return [play(seed) for seed in seeds]


def test_loads_and_recoveries_are_among_what_is_played() -> None:
    engines = play_all(range(6))
    for some in (engines[::2], engines[1::2]):
        assert sum(engine.num_loaded for engine in some) > 50
        assert sum(engine.num_recoveries for engine in some) > 0


@pytest.mark.long
def test_fresh_seeds() -> None:
    first = secrets.randbelow(1 << 40)
    for seed in range(first, first + 1000):
        try:
            play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_a_block_that_is_given_away_too_soon_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = Leader.finished

    def too_soon(self: Leader, request: MiniRequest, blocks: list[list[int]]) -> bool:
        finished(self, request, blocks)
        self._orders.sending.clear()
        return False

    monkeypatch.setattr(Leader, "finished", too_soon)
    with pytest.raises(AssertionError, match="wrong block"):
        play_all(range(24))


def test_a_window_that_does_not_wait_for_what_is_copied_out_of_it_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Leader, "_see_taken", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong block"):
        play_all(range(1, 60, 2))


def test_a_window_of_a_request_that_has_to_wait_for_blocks_is_seen_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Leader, "_see_stalled", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong block"):
        play_all(range(39, 100, 2))
