"""What a collector hears of requests: with `--otlp` one span each, and one for every answer."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from collector import Collector, collecting
from quire.engine.messages import Finish, Handed
from quire.errors import ConfigError
from quire.server.config import ServerConfig
from quire.server.telling import trace_handover
from quire.tracing.spans import TraceContext
from quire.web.traced import Tracer
from unit.server.scripted import Rig

ASKED = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
REQUEST = "POST /v1/chat/completions"


@contextlib.contextmanager
def told(collector: Collector) -> Iterator[Rig]:
    tracer = Tracer(collector.url, lambda _outcome, _number: None, {"quire.role": "unified"})
    try:
        yield Rig(tracer=tracer)
    finally:
        tracer.close()  # all that waits is sent


def test_a_request_and_its_answers_are_told_in_the_trace_of_whoever_asked():
    before = time.time_ns()
    with collecting() as collector, told(collector) as rig:
        response = rig.chat("hello", n=2, headers={"traceparent": ASKED.header})
    usage = response.json()["usage"]
    (request,) = collector.named(REQUEST)
    assert (request.trace, request.parent, request.kind) == (ASKED.trace, ASKED.span, 2)
    assert request.about["http.response.status_code"] == 200
    assert request.about["quire.request"] == response.headers["x-request-id"]
    assert request.resource["service.name"] == "quire"
    assert request.resource["quire.role"] == "unified"
    answers = collector.named("generate", 2)
    assert [answer.about["quire.choice"] for answer in answers] == [0, 1]
    for answer, call in zip(answers, rig.engine.calls, strict=True):
        assert (answer.trace, answer.parent) == (ASKED.trace, request.id)
        assert TraceContext.read(call.trace) == (ASKED.trace, answer.id, True)
        assert answer.events == ["first token"]
        assert answer.about["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert answer.about["gen_ai.usage.cache_read.input_tokens"] == rig.engine.cached.total
        assert answer.about["quire.cached_tokens.host"] == rig.engine.cached.host
        assert before <= request.began_ns <= answer.began_ns <= answer.ended_ns
        assert answer.ended_ns <= request.ended_ns <= time.time_ns()
    texts = str(collector.spans)
    assert "hello" not in texts  # lengths and times, never a token


@pytest.mark.parametrize("header", [None, "nonsense"])
def test_a_request_that_names_no_trace_begins_one(header):
    with collecting() as collector, told(collector) as rig:
        rig.chat(headers={"traceparent": header} if header else None)
    (request,) = collector.named(REQUEST)
    (answer,) = collector.named("generate")
    assert not request.parent
    assert answer.parent == request.id


def test_who_does_not_want_to_be_recorded_is_not():
    with collecting() as collector, told(collector) as rig:
        rig.chat(headers={"traceparent": ASKED._replace(is_sampled=False).header})
        rig.request("GET", "/health")
        rig.request("GET", "/v1/models")
    assert not collector.spans
    assert not rig.engine.calls[0].trace


def test_a_request_that_fails_says_how():
    with collecting() as collector, told(collector) as rig:
        rig.engine.end = (Finish.TIMEOUT, "it took too long")
        response = rig.chat()
    (request,) = collector.named(REQUEST)
    assert request.about["http.response.status_code"] == response.status_code
    assert request.error == (str(response.status_code) if response.status_code >= 500 else "")
    (answer,) = collector.named("generate")
    assert answer.error == answer.about["quire.outcome"] != "answered"


def test_a_hand_over_is_told_from_both_sides():
    with collecting() as collector, told(collector) as rig:
        now = time.monotonic()
        for is_giver in (False, True):
            about = {"peer": "tcp://a:1", "received": 12}
            trace_handover(Handed(ASKED.header, is_giver, now - 2, now, about), rig.service.tracer)
        trace_handover(Handed("nonsense", False, now, now, {}), rig.service.tracer)
    took = [collector.named("receive pages"), collector.named("give pages")]
    for (span,) in took:
        assert (span.trace, span.parent) == (ASKED.trace, ASKED.span)
        assert span.about == {"quire.handover.peer": "tcp://a:1", "quire.handover.received": 12}
        assert 1.9e9 < span.ended_ns - span.began_ns < 2.1e9
    assert len(collector.spans) == 2


def test_without_otlp_nothing_of_it_is_loaded():
    code = (
        "import sys, quire.server.run, quire.server.config as c; c.ServerConfig();"
        "from unit.server.scripted import Rig; assert Rig().chat().status_code == 200;"
        "sys.exit(any('traced' in n or 'quire.tracing' in n for n in sys.modules))"
    )
    found = os.pathsep.join(filter(None, sys.path))  # these tests' own modules, too
    environment = {**os.environ, "PYTHONPATH": found}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert ran.returncode == 0


def test_an_address_that_is_none_is_said_before_a_model_is_loaded():
    with pytest.raises(ConfigError, match="otlp 'collector:4318' is not the address"):
        ServerConfig(otlp="collector:4318")
