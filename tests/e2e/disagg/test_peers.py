"""Engines that take pages from each other's host, and compute only what nobody has."""

import pytest

from e2e.disagg.pair import Pair, engines
from e2e.exactness.subjects import PAGE, TINY_SUBJECTS, Subject
from quire.engine.config import Role

SUBJECTS = [s for s in TINY_SUBJECTS if s.name in ("qwen3_next", "gemma3")]


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_a_prefix_comes_from_a_peer(subject: Subject) -> None:
    first, second = subject.ask()[:2]
    with engines(subject) as make:
        holder = make(Role.UNIFIED)
        asker = make(Role.UNIFIED, peers=[holder.info.peer])
        there, here = Pair([], holder), Pair([holder], asker)
        there.ask(subject, [first], "computed at the peer")
        there.settle()
        here.ask(subject, [first], "from the peer")
        assert here.total().peer == len(first) // PAGE * PAGE
        here.settle()
        here.ask(subject, [first], "from the own device")
        assert here.total().peer == 0
        here.ask(subject, [second], "with a common beginning")
        here.settle()


def test_a_peer_that_has_nothing_or_is_not_there_costs_nothing_but_time() -> None:
    subject = SUBJECTS[0]
    prompts = subject.ask()[:2]
    with engines(subject) as make:
        holder = make(Role.UNIFIED)
        asker = make(Role.UNIFIED, peers=["tcp://127.0.0.1:9", holder.info.peer])
        here = Pair([holder], asker)
        here.ask(subject, prompts[:1], "nobody has it")
        assert here.total().total == 0
        here.settle()
        assert holder.exchange is not None
        holder.exchange.close()
        here.ask(subject, prompts[1:], "nobody is there")
