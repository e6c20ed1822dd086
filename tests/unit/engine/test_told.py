"""Answers that are given beforehand: said as they were given, whatever happens on the way. That the
log probabilities are those of the model is tested with a real one, in e2e/server."""

import pytest

from engine_support import PAGE, VOCABULARY, TinyEngine, oracle
from quire.engine.grammar.told import MAX_AT_ONCE, Told
from quire.engine.messages import Finish
from speculating import speculation

TEXT = [(7 * i * i + 3 * i + 1) % VOCABULARY for i in range(5 * PAGE + 3)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ahead": True},
        {"mix": "full window"},
        {"mix": "full recurrent"},
        {"reuse": False},
        {"speculation": "ngram"},
    ],
    ids=str,
)
def test_an_answer_is_said_as_it_was_given(options):
    if "speculation" in options:
        options = {"speculation": speculation(oracle, 4, [4, 0, 2], VOCABULARY)}
    with TinyEngine(**options) as tiny:
        request = tiny.ask(TEXT[:1], len(TEXT) - 1, told=TEXT[1:])
        tiny.run()
        assert tiny.tokens(request) == TEXT[1:]
        assert tiny.last(request).finish is Finish.LENGTH
        assert len(tiny.outputs) < len(TEXT) / 2 or "recurrent" in str(options), "one by one"


def test_others_beside_it_and_after_it_are_as_alone():
    prompt = [5] * (2 * PAGE)
    with TinyEngine(ahead=True, device_pages=24) as tiny:
        plain = tiny.ask(prompt, 30)
        scored = [tiny.ask(TEXT[:1], len(TEXT) - 1, told=TEXT[1:]) for _ in range(3)]
        tiny.run()
        again = tiny.ask(TEXT, 12)
        tiny.run()
        assert tiny.tokens(plain) == oracle(prompt, 30)
        assert tiny.tokens(again) == oracle(TEXT, 12)
        assert all(tiny.tokens(each) == TEXT[1:] for each in scored)


def test_behind_what_it_was_told_it_goes_on_by_itself():
    with TinyEngine() as tiny:
        request = tiny.ask(TEXT[:1], len(TEXT) - 1 + 6, told=TEXT[1:])
        tiny.run()
        assert tiny.tokens(request) == TEXT[1:] + oracle(TEXT, 6)


def test_many_tokens_are_computed_in_a_step():
    told = Told(list(range(100)))
    assert told.coming() == list(range(MAX_AT_ONCE))
    for token in range(98):
        assert told.advance(token)
    assert told.coming() == [98]
    assert told.allowed([98])[1] == bytes(12) + bytes([8]), "99 alone"
    assert told.fitting([98, 99]) == [98, 99]
    assert told.fitting([98, 7]) == [98]
    told.advance(98)
    assert told.coming() == []
    told.advance(99)
    assert told.allowed() == [b""], "all may come"
