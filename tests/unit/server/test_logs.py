"""What the log says: one line per answer, trouble once when it begins and once when it is over."""

import io
import json
import logging

import pytest

from quire import logs
from quire.engine.messages import EngineStatus, HandoverStatus, StoreStatus
from quire.server.config import ServerConfig
from quire.server.notices import Notices
from quire.store.account import StoreHealth
from unit.server.scripted import ADMIN_KEY, Rig


def status(store=(), links=None, answer=(True,), **counters) -> EngineStatus:
    return EngineStatus(
        tiers=[],
        store=StoreStatus("attached", "memory://", dict(store), [StoreHealth(a) for a in answer]),
        waiting=0,
        running=0,
        waiting_tokens=0,
        operations={},
        waiting_writes=0,
        ended={},
        leases=0,
        counters=counters,
        seconds={},
        handover=None if links is None else HandoverStatus(links=links),
    )


class Told:
    def __init__(self) -> None:
        self._notices, self.now_s = Notices(), 0.0

    def __call__(self, after_s: float = 1.0, **found) -> list[str]:
        self.now_s += after_s
        return [notice.text for notice in self._notices.look(status(**found), self.now_s)]


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_store_that_fails_is_said_once_counted_and_said_when_it_is_over(told):
    assert told(store={"written:ok": 9, "read:miss": 9}) == []
    (first,) = told(store={"written:failed": 3})
    assert "did not take (failed): 3" in first
    for count in range(4, 394):
        assert told(store={"written:failed": count}) == []
    (over,) = told(31, store={"written:failed": 393})
    assert "over, 393 in all" in over
    assert told(31, store={"written:failed": 393}) == []
    assert len(told(store={"written:failed": 394})) == 1  # anew


def test_one_failure_that_two_count_is_one_line(told):
    """The store's client counts a page that was not written, and the engine whose write it was."""
    store, engine = {"written:failed": 3, "read:failed": 1}, {"write:failed": 3, "fetch:failed": 1}
    assert len(told(store=store, **engine)) == 2
    (late,) = told(store=store, **engine, **{"write:timeout": 2})
    assert "write failed (timeout): 2" in late


def test_what_was_given_up_here_is_no_failure(told):
    assert told(store={"read:cancelled": 7}, **{"fetch:cancelled": 7, "load:cancelled": 1}) == []


def test_a_breaker_and_peers_are_said_when_they_change(told):
    assert told(answer=[True], links={"tcp://a:1": "dialled"}) == []
    assert told(answer=[False], links={"tcp://a:1": "connected"}) == [
        "the store does not answer and is not asked for a while",
        "peer tcp://a:1 is up",
    ]
    assert told(answer=[False], links={"tcp://a:1": "connected"}) == []
    assert told(answer=[True], links={"tcp://a:1": "refused"}) == [
        "the store answers again",
        "peer tcp://a:1 is down: refused",
    ]


def test_of_several_stores_it_is_said_which_does_not_answer(told):
    assert told(answer=[True, True]) == []
    assert told(answer=[True, False]) == ["store 1 does not answer and is not asked for a while"]
    assert told(answer=[False, True]) == [
        "store 0 does not answer and is not asked for a while",
        "store 1 answers again",
    ]


def test_of_a_store_that_is_taken_away_it_is_not_said_that_it_answers_again(told):
    assert told(answer=[True, False]) == ["store 1 does not answer and is not asked for a while"]
    assert told(answer=[]) == []
    assert told(answer=[False]) == ["the store does not answer and is not asked for a while"]
    assert told(answer=[True]) == ["the store answers again"]


def test_another_store_counts_from_nothing(told):
    told(store={"written:failed": 393})
    assert len(told(31, store={"written:failed": 393})) == 1  # over
    assert told(answer=[]) == []
    (said,) = told(store={"written:failed": 5})
    assert "did not take (failed): 5" in said


def test_what_the_store_before_failed_at_is_not_said_again_of_the_engine(told):
    """The engine goes on counting where the store's client is gone."""
    engine = {"write:failed": 73}
    assert len(told(store={"written:failed": 73}, **engine)) == 1
    assert told(answer=[], **engine) == []
    (over,) = told(31, answer=[True], **engine)
    assert "over, 73 in all" in over
    (said,) = told(store={"written:failed": 2}, **{"write:failed": 75})
    assert "did not take (failed): 2" in said


def test_preemption_is_said_once(told):
    assert len(told(requests_preempted=2)) == 1
    assert told(requests_preempted=200) == []


def test_every_answer_has_a_line_that_machines_read(caplog):
    rig = Rig(config=ServerConfig(admin_key=ADMIN_KEY, log_requests=True))
    with caplog.at_level(logging.INFO, "quire.requests"):
        response = rig.chat("hello there")
    (record,) = caplog.records
    usage = response.json()["usage"]
    assert record.fields["prompt_tokens"] == usage["prompt_tokens"]
    assert record.fields["output_tokens"] == usage["completion_tokens"]
    assert record.fields["request"] == response.headers["x-request-id"]
    assert record.fields["outcome"] == "answered"
    assert record.fields["ttft_s"] is not None
    assert "hello" not in logs.JsonLines().format(record)
    caplog.clear()
    Rig().chat("hello")
    assert not caplog.records  # not asked for


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_person_reads_sentences_and_a_machine_reads_json(monkeypatch, is_terminal):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    logs.configure(logging.WARNING, stream)
    try:
        logging.getLogger("quire.events").info("it is %s", "over", extra={"fields": {"count": 2}})
        logging.getLogger("quire.server").info("nobody asked")
    finally:
        root.setLevel(logging.WARNING)
    (line,) = stream.getvalue().splitlines()
    assert logs.message_of(line) == "it is over"
    if is_terminal:
        assert line == "quire: it is over"
    else:
        found = json.loads(line)
        assert (found["level"], found["logger"], found["count"]) == ("info", "quire.events", 2)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_of_a_server_that_we_started_says_whose_it_is(is_terminal):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    told = {"level": "info", "message": "peer a is up", "event": "peer"}
    logs.relay("decode", json.dumps(told), stream)
    logs.relay("decode", "quire: loading", stream)
    first, second = stream.getvalue().splitlines()
    if is_terminal:
        assert (first, second) == ("quire: [decode] peer a is up", "quire: [decode] loading")
    else:
        assert json.loads(first) == told | {"server": "decode"}
        assert json.loads(second) == {"message": "loading", "server": "decode"}
