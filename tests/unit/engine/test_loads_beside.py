"""Pages on their way to one request hold up nobody else: those that decode, or whose pages came."""

import threading

import pytest

from engine_support import PAGE, TinyEngine, oracle
from quire.types import Tier

FIRST = [(7 * i + 3) % 50 for i in range(6 * PAGE)]
SECOND = [(11 * i + 5) % 50 for i in range(6 * PAGE)]
PATIENCE_S = 20.0
"""Of a copy that is held: who waits for it all the same is found out, and no test hangs."""


class HeldLoads:
    """From the host to the device: those after the first `free` are held until they are let go."""

    def __init__(self, tiny: TinyEngine, free: int) -> None:
        self.gave_up = False
        self.num_begun = 0
        self._free = free
        self._let_go = threading.Event()
        engine = tiny.model.worker.components["full"].engine
        engine.load_pages = 1
        self._move, engine._loads._move = engine._loads._move, self._held

    def let_go(self) -> None:
        self._let_go.set()

    def _held(self, *args) -> None:
        self.num_begun += 1
        if self.num_begun > self._free and not self._let_go.wait(PATIENCE_S):
            self.gave_up = True
        self._move(*args)


def on_the_host(tiny: TinyEngine, *prompts: list[int]) -> None:
    for prompt in prompts:
        tiny.answer(prompt, 1)
    tiny.manager.flush(Tier.DEVICE)


@pytest.mark.parametrize("ahead", [False, True])
def test_those_that_decode_go_on_while_pages_come_for_another(ahead):
    with TinyEngine(ahead=ahead) as tiny:
        on_the_host(tiny, FIRST)
        decoding = tiny.ask(SECOND, 20)
        tiny.step(4)
        held = HeldLoads(tiny, free=0)
        loading = tiny.ask([*FIRST, 1, 2], 3)
        while len(tiny.tokens(decoding)) < 15 and not held.gave_up:
            tiny.step()
        assert not held.gave_up
        assert held.num_begun == 1
        assert not tiny.of(loading)
        held.let_go()
        tiny.run()
        assert tiny.tokens(decoding) == oracle(SECOND, 20)
        assert tiny.tokens(loading) == oracle([*FIRST, 1, 2], 3)
        assert tiny.cached(loading).host == len(FIRST)


@pytest.mark.parametrize("ahead", [False, True])
def test_of_two_that_came_together_the_first_does_not_wait_for_the_others_pages(ahead):
    with TinyEngine(ahead=ahead) as tiny:
        on_the_host(tiny, FIRST, SECOND)
        held = HeldLoads(tiny, free=1)
        first, second = tiny.ask([*FIRST, 1], 5), tiny.ask([*SECOND, 1], 5)
        while not tiny.of(first) and not held.gave_up:
            tiny.step()
        assert not held.gave_up
        assert not tiny.of(second)
        held.let_go()
        tiny.run()
        assert tiny.tokens(first) == oracle([*FIRST, 1], 5)
        assert tiny.tokens(second) == oracle([*SECOND, 1], 5)


def test_a_batch_that_takes_long_waits_for_them_at_its_end():
    """They come while it computes, and need not wait for a batch of their own behind it."""
    with TinyEngine(chunk_tokens=16) as tiny:
        on_the_host(tiny, FIRST)
        long, loading = tiny.ask(SECOND[:12], 1), tiny.ask([*FIRST, 1, 2], 1)
        tiny.step()
        assert tiny.tokens(long) == oracle(SECOND[:12], 1)
        assert tiny.tokens(loading) == oracle([*FIRST, 1, 2], 1)
