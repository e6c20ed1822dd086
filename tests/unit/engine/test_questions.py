"""What an administrator can ask of a running engine."""

import msgspec
import pytest

from engine_support import PAGE, TinyEngine, oracle
from quire.engine.messages import (
    Answer,
    Attach,
    Detach,
    EngineStatus,
    Flush,
    Flushed,
    GetStatus,
    PutQuestion,
    StoreStatus,
    Warm,
    Warmed,
)

PROMPT = [(5 * i + 1) % 50 for i in range(26)]
PAGES = len(PROMPT) // PAGE


class Desk:
    """Asks, and waits for the answer."""

    def __init__(self, tiny: TinyEngine) -> None:
        self.tiny = tiny
        self.number = 0

    def ask(self, question, kind=None):
        """The decoded result, or the error as a string."""
        self.number += 1
        self.tiny.engine.handle(PutQuestion(self.number, question))
        answers: list[Answer] = []
        while not answers:
            messages = self.tiny.engine.take_messages()
            answers = [m for m in messages if isinstance(m, Answer) and m.id == self.number]
            self.tiny.engine.step()
        if answers[0].error:
            return answers[0].error
        return msgspec.msgpack.decode(answers[0].result, type=kind)


@pytest.fixture
def tiny():
    with TinyEngine(store="memory://?max=1MiB") as engine:
        yield engine


@pytest.fixture
def desk(tiny):
    return Desk(tiny)


def test_status_tells_what_each_tier_holds(tiny, desk):
    tiny.answer(PROMPT, 2)
    status = desk.ask(GetStatus(check=True), EngineStatus)
    assert [(tier.name, tier.used_pages) for tier in status.tiers] == [
        ("device", PAGES),
        ("host", PAGES),
    ]
    assert (status.waiting, status.running, status.leases) == (0, 0, 0)
    assert status.store.state == "attached"
    assert status.store.counters["written:ok"] == PAGES
    assert status.counters["requests_finished"] == 1


def test_who_asks_right_after_an_answer_hears_that_its_pages_are_being_moved(tiny, desk):
    """However soon the question comes: here before the engine has made another step."""
    tiny.ask(PROMPT[: PAGE + 1], 1)
    while len(tiny.scheduler):
        tiny.engine.step()
    assert not tiny.manager.operations.running
    assert desk.ask(GetStatus(), EngineStatus).operations == {"backup": 1}


def test_a_running_requests_pages_count_as_locked(tiny, desk):
    tiny.ask(PROMPT, 40)
    while not tiny.scheduler.running:
        tiny.step()
    status = desk.ask(GetStatus(), EngineStatus)
    assert status.tiers[0].locked_pages > 0
    assert status.running == 1
    assert status.running_tokens >= len(PROMPT)
    assert status.waiting_tokens == 0


def test_flushing_empties_the_tiers_named(tiny, desk):
    tiny.answer(PROMPT, 2)
    assert desk.ask(Flush(["device"]), Flushed).pages == {"device": PAGES}
    status = desk.ask(GetStatus(), EngineStatus)
    assert [tier.used_pages for tier in status.tiers] == [0, PAGES]
    assert desk.ask(Flush(["host", "store"]), Flushed).pages == {"host": PAGES}
    request = tiny.ask(PROMPT, 2)
    tiny.run()
    assert tiny.cached(request).total == 0


def test_clearing_says_which_stores_are_left_alone(desk):
    assert desk.ask(Flush(["store"]), Flushed).left_alone == []
    desk.ask(Attach("memory:// memory://theirs?write=never"), StoreStatus)
    assert desk.ask(Flush(["host"]), Flushed).left_alone == []
    assert desk.ask(Flush(["store"]), Flushed).left_alone == ["memory://theirs?write=never"]


@pytest.mark.parametrize("tiers", [[], ["disk"], ["device", "x"]])
def test_unknown_tiers_are_refused(desk, tiers):
    assert "device, host, store" in desk.ask(Flush(tiers))


def test_a_store_can_be_detached_and_attached_again(tiny, desk):
    tiny.answer(PROMPT, 2)
    assert desk.ask(Detach(), StoreStatus).state == "detached"
    assert tiny.answer(PROMPT, 2) == oracle(PROMPT, 2)
    assert desk.ask(Attach("memory://?max=1MiB"), StoreStatus).state == "attached"
    assert "scheme" in desk.ask(Attach("nowhere://x"))
    assert tiny.answer(PROMPT, 3) == oracle(PROMPT, 3)


def test_clearing_without_a_store_is_an_error(desk):
    desk.ask(Detach(), StoreStatus)
    assert "no store is attached" in desk.ask(Flush(["store"]))


def test_warming_brings_a_prompt_from_the_store_to_the_host(tiny, desk):
    tiny.answer(PROMPT, 2)
    desk.ask(Flush(["device", "host"]), Flushed)
    tokens = as_bytes(PROMPT)
    warmed = desk.ask(Warm(tokens), Warmed)
    assert warmed.prompt_tokens == len(PROMPT)
    assert warmed.cached.store == PAGES * PAGE
    assert desk.ask(Warm(tokens), Warmed).cached.host == PAGES * PAGE
    assert desk.ask(Warm(tokens, "other"), Warmed).cached.total == 0
    assert not tiny.manager.leases
    request = tiny.ask(PROMPT, 2)
    tiny.run()
    assert tiny.cached(request).host > 0
    assert tiny.tokens(request) == oracle(PROMPT, 2)


def as_bytes(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)
