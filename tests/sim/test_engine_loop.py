"""The engine's loop under random load: arrivals, aborts, flushes, store changes, faults, by seed.

The model is SumModel, so every answer is known; workers, copies and stores are real, so the order
of completions is not repeatable, but what is asked is. After every step the cache's invariants are
checked; at the end everything has come back.
"""

import random
import time

import pytest

from engine_support import MIXES, PAGE, TinyEngine, oracle
from quire.config import PrefetchPolicy, WritePolicy
from quire.engine.messages import Attach, Detach, Finish, Flush, GetStatus, PutQuestion, Warm
from quire.manager import Way
from quire.types import Tier

STEPS = 700
FAULTY = "faulty+memory://?max=200KiB&drop=0.05&corrupt=0.05&raise=0.05&truncate=0.05&delay=0.1&delay_s=0.002&seed={seed}"


class Load:
    """What happens to the engine, by chance."""

    def __init__(self, seed: int, *, ahead: bool = False) -> None:
        self.random = random.Random(seed)
        self.mix = MIXES[seed % len(MIXES)]
        self.tiny = TinyEngine(
            mix=self.mix,
            device_slots=self.random.choice([6, 10, 24]),
            host_slots=self.random.choice([3, 24]),
            device_pages=self.random.choice([20, 32, 64]),
            host_pages=self.random.choice([24, 48, 128]),
            chunk_tokens=self.random.choice([4, 9, 16, 64]),
            max_running=self.random.choice([1, 3, 8]),
            max_waiting=12,
            write=self.random.choice(list(WritePolicy)),
            prefetch=self.random.choice(list(PrefetchPolicy)),
            store=FAULTY.format(seed=seed),
            ahead=ahead,
            way=Way.BOTH if seed // 4 % 2 == 0 else None,
        )
        self.families = [self._tokens(40) for _ in range(4)]
        self.asked: dict[str, tuple[list[int], int, list[int]]] = {}
        self.aborted: set[str] = set()
        self.seed = seed

    def turn(self) -> None:
        chance = self.random.random()
        if chance < 0.15:
            self._arrive()
        elif chance < 0.19:
            self._abort()
        elif chance < 0.21:
            component = self.random.choice(self.tiny.manager.components)
            self.tiny.manager.flush(self.random.choice([Tier.DEVICE, Tier.HOST]), component.name)
        elif chance < 0.22:
            self.tiny.manager.flush(self.random.choice([Tier.DEVICE, Tier.HOST]))
        elif chance < 0.23:
            self._question()
        elif chance < 0.235:
            self.tiny.model.fail_next = self.random.choice(["launch", "collect"])
        self.tiny.step()

    def _arrive(self) -> None:
        family = self.random.choice(self.families)
        head = family[: self.random.randrange(len(family) + 1)]
        prompt = head + self._tokens(self.random.randint(1, 20))
        num_tokens = self.random.randint(1, 18)
        salt = self.random.choice(["", "", "", "a"])
        timeout_s = self.random.choice([600.0] * 9 + [0.01])
        stops = [self.random.randrange(50) for _ in range(self.random.choice([0, 0, 4]))]
        request = self.tiny.ask(prompt, num_tokens, salt=salt, timeout_s=timeout_s, stop_ids=stops)
        self.asked[request] = prompt, num_tokens, stops

    def _abort(self) -> None:
        alive = [r.id for r in self.tiny.scheduler.running + self.tiny.scheduler.waiting]
        if alive:
            request = self.random.choice(alive)
            self.aborted.add(request)
            self.tiny.scheduler.abort(request)

    def _question(self) -> None:
        tokens = bytes(4 * PAGE * 3)
        question = self.random.choice(
            [
                GetStatus(check=True),
                Detach(),
                Attach(FAULTY.format(seed=self.seed + 1)),
                Flush(["device", "host", "store"]),
                Warm(tokens),
            ]
        )
        self.tiny.engine.handle(PutQuestion(self.random.randrange(1 << 30), question))

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(50) for _ in range(count)]


@pytest.mark.parametrize(
    ("seed", "ahead"),
    [
        pytest.param(seed, seed >= 12, marks=[pytest.mark.long] if seed % 2 else [])
        for seed in range(28)
    ],
)
def test_every_answer_is_right_and_everything_comes_back_c32(seed, ahead, capsys):
    load = Load(seed, ahead=ahead)
    with load.tiny as tiny:
        for _ in range(STEPS):
            load.turn()
        tiny.run()
        tiny.step(20)
        finishes = dict.fromkeys(Finish, 0)
        for request, (prompt, num_tokens, stops) in load.asked.items():
            right, tokens = oracle(prompt, num_tokens, stops, mix=load.mix), tiny.tokens(request)
            assert tokens == right[: len(tokens)], request
            ends = [o.finish for o in tiny.of(request) if o.finish is not None]
            if request in load.aborted:
                assert not ends
                continue
            assert len(ends) == 1, f"{request} ended {len(ends)} times"
            finishes[ends[0]] += 1
            if ends[0] in (Finish.LENGTH, Finish.STOP):
                assert tokens == right
        assert finishes[Finish.LENGTH] > 20
        tiny.manager.check_invariants()
        assert not tiny.manager.leases
        for _ in range(1200):  # a write that is tried again holds its pages until it has ended
            for tier in Tier:
                tiny.manager.flush(tier)
            tiny.run()
            if not any(tier.used_pages for tier in tiny.engine.tiers()):
                break
            time.sleep(0.05)
        assert not any(tier.used_pages for tier in tiny.engine.tiers())
