"""Answers that follow a grammar: which tokens may come, and that no way through the engine (ahead,
speculating, preempted, beside others) changes them."""

import json
import random
import threading
import time

import numpy as np
import pytest

from engine_support import PAGE, VOCABULARY, TinyEngine, oracle
from evidence.schemas.cases import follows, random_schema
from quire.engine.grammar import CompileStage, Grammars
from quire.engine.grammar.compiling import GrammarError, Words
from quire.engine.messages import Finish
from quire.text.grammars import json_rule
from speculating import speculation

llguidance = pytest.importorskip("llguidance")

CHARS = '{}[]":, 0123456789-.abcdefghijklmnopqrstuvwxyzE+'
END = 49
assert len(CHARS) == 48


def words() -> Words:
    """A token per character, for the 50 tokens of SumModel; the last is the end."""

    class Tiny:
        eos_token_id = END
        bos_token_id = None
        tokens = [char.encode() for char in CHARS] + [b"\xff<pad>", b"\xff<end>"]
        special_token_ids = (48, END)

        def __call__(self, text):
            return [CHARS.index(char) for char in bytes(text).decode()]

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tiny()), n_vocab=50)
    return Words(tokenizer, 50, tokenizer.eos_tokens)


def text(tokens: list[int]) -> str:
    return "".join(CHARS[token] for token in tokens if token != END)


def ids(chars: str) -> list[int]:
    return [CHARS.index(char) for char in chars]


def lark(schema: object) -> str:
    return f"start: %json {json.dumps(schema)}\n"


def ending(schema: dict) -> str:
    """As the server writes it: with a bound on all that is not bounded."""
    return json_rule("start", schema, "schema") + "\n"


NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 6}
OBJECT = {
    "type": "object",
    "properties": {"aa": {"type": "string", "maxLength": 9}, "bb": NUMBERS | {"maxItems": 7}},
    "required": ["aa", "bb"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def held(grammar: str, stop_ids=(END,)):
    compiled = Grammars(words).ask(grammar)
    while compiled.stage is CompileStage.PENDING:
        time.sleep(0.001)
    assert compiled.stage is CompileStage.READY, compiled.error
    return compiled.begin(stop_ids)


def allowed(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


# ---- one request's place -------------------------------------------------------------------------


def test_an_answer_ends_where_it_may_and_nowhere_else():
    place = held('start: "ab" "c"?\n')
    for char in "ab":
        assert allowed(place.allowed()[0]) == ids(char)
        assert place.advance(CHARS.index(char))
    assert allowed(place.allowed()[0]) == [*ids("c"), END]
    assert place.advance(CHARS.index("c"))
    assert allowed(place.allowed()[0]) == [END]


def test_only_the_stop_ids_of_the_request_end_it():
    place = held('start: "a"\n', stop_ids=[7])
    assert place.advance(CHARS.index("a"))
    assert allowed(place.allowed()[0]) == [7]


def test_proposals_that_do_not_fit_are_cut_off():
    place = held('start: "abc" "d"*\n')
    assert place.fitting(ids("abx")) == ids("ab")
    assert place.fitting([*ids("abc"), END, END]) == ids("abc")
    assert place.fitting([]) == []
    assert not place.error


def test_masks_behind_proposals_leave_the_place_where_it_was():
    """At every place of random answers, with random proposals that fit: each mask is that of a
    request that has come there one token at a time."""
    rng = random.Random(5)
    for _ in range(10):
        one, other = held(lark(OBJECT)), held(lark(OBJECT))
        for _ in range(60):
            ahead: list[int] = []
            probe = [rng.choice(allowed(one.allowed()[0]))]
            while len(ahead) < 4 and len(one.fitting([*ahead, *probe])) > len(ahead):
                ahead += probe
                probe = [rng.choice(allowed(one.allowed(ahead)[-1]))]
            masks = one.allowed(ahead)
            assert len(masks) == 1 + len(ahead)
            assert masks[0] == other.allowed()[0]
            if not ahead:
                break
            step = rng.randint(1, len(ahead))
            for i, token in enumerate(ahead[:step]):
                assert other.advance(token)
                assert one.advance(token)
                assert other.allowed()[0] == masks[i + 1] == one.allowed()[0]


def test_after_what_may_not_stand_there_nothing_may():
    place = held('start: "ab"\n')
    assert not place.advance(CHARS.index("x"))
    assert allowed(place.allowed()[0]) == []
    assert place.error


# ---- compiling -----------------------------------------------------------------------------------


def test_asking_never_waits_and_the_vocabulary_is_read_once():
    gate, reads = threading.Event(), []

    def slow() -> Words:
        reads.append(1)
        assert gate.wait(60)
        return words()

    grammars = Grammars(slow)
    asked = [grammars.ask(f'start: "{char}"\n') for char in "abcab"]
    assert {each.stage for each in asked} == {CompileStage.PENDING}
    assert asked[0] is asked[3]
    gate.set()
    while any(each.stage is CompileStage.PENDING for each in asked):
        time.sleep(0.001)
    assert {each.stage for each in asked} == {CompileStage.READY}
    assert len(reads) == 1


def test_no_more_than_some_are_kept():
    grammars = Grammars(words)
    first = grammars.ask('start: "a"\n')
    for i in range(100):
        grammars.ask(f'start: "{i}"\n')
    assert len(grammars._kept) == 64
    assert grammars.ask('start: "a"\n') is not first
    grammars.ask("x" * (5 << 20))
    assert len(grammars._kept) == 1


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: (", "Expected"),
        (lark({"not": {"type": "string"}}), "not"),
        (lark({"type": "strange"}), "strange"),
        (lark({"$ref": "http://example.com/x"}), "example.com"),
        (lark({"type": "string", "pattern": "("}), ""),
        ("x" * (2 << 20), "characters"),
    ],
)
def test_what_is_no_grammar_says_so_in_one_line(grammar, reason):
    with TinyEngine(grammars=Grammars(words)) as tiny:
        good = tiny.ask([1, 2, 3], 4)
        bad = tiny.ask([1, 2, 3], 4, grammar=grammar)
        tiny.run()
        (output,) = tiny.of(bad)
        assert (output.finish, output.tokens) == (Finish.INVALID, [])
        assert reason in output.error
        assert not {"\n", "%json"} & set(output.error.partition("%json"))
        assert tiny.tokens(good) == oracle([1, 2, 3], 4)
        assert not tiny.manager.leases


def test_what_becomes_too_complex_on_the_way_ends_that_answer_alone():
    names = {f"k{i}": {} for i in range(3000)}
    many = lark({"type": "object", "properties": names, "required": ["k2999"]})
    with TinyEngine(grammars=Grammars(words)) as tiny:
        good = tiny.ask([1, 2, 3], 30)
        bad = tiny.ask([1, 2, 3], 100, grammar=many, stop_ids=[END])
        tiny.run()
        assert tiny.last(bad).finish is Finish.INVALID
        assert "items" in tiny.last(bad).error
        assert tiny.tokens(good) == oracle([1, 2, 3], 30)


def test_a_vocabulary_that_cannot_be_read_fails_the_request_alone():
    def missing() -> Words:
        raise GrammarError("there is none")

    with TinyEngine(grammars=Grammars(missing)) as tiny:
        bad = tiny.ask([1, 2, 3], 4, grammar='start: "a"\n')
        tiny.run()
        assert (tiny.last(bad).finish, tiny.last(bad).error) == (Finish.INVALID, "there is none")


def test_an_abort_while_it_is_compiled():
    gate = threading.Event()

    def slow() -> Words:
        assert gate.wait(60)
        return words()

    with TinyEngine(grammars=Grammars(slow)) as tiny:
        request = tiny.ask([1, 2, 3], 4, grammar="start: (")
        tiny.step(3)
        tiny.scheduler.abort(request)
        gate.set()
        tiny.answer([4, 5], 3)
        assert not tiny.of(request)


# ---- through the engine --------------------------------------------------------------------------


def asked(tiny: TinyEngine, seed: int, schema: object = OBJECT, count: int = 120):
    return tiny.ask(prompt(seed), count, stop_ids=[END], grammar=lark(schema))


def prompt(seed: int) -> list[int]:
    return [(seed * 7 + i * i * (seed + 1)) % 50 for i in range(3 * PAGE)]


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """The answers of an engine that does one thing after the other."""
    found = {}
    with TinyEngine(grammars=Grammars(words)) as tiny:
        for seed in range(4):
            request = asked(tiny, seed)
            tiny.run()
            assert tiny.last(request).finish is Finish.STOP
            found[seed] = tiny.tokens(request)
            assert follows(json.loads(text(found[seed])), OBJECT)
    return found


@pytest.mark.parametrize("plan", [[4], [2, 0, 4], [0]])
def test_speculation_goes_on_under_it(alone, plan):
    """Of a proposal some tokens are right, and the others are what the grammar forbids, or allows
    and the model does not say."""

    def answers(tokens, count):
        seed = next((seed for seed in alone if list(tokens[:12]) == prompt(seed)), None)
        if seed is None:
            return oracle(tokens, count)
        return ([*alone[seed], *[END] * 8])[len(tokens) - 12 :][:count]

    drafts = speculation(answers, 4, plan, VOCABULARY)
    with TinyEngine(grammars=Grammars(words), speculation=drafts, ahead=True) as tiny:
        plain = tiny.ask(prompt(9), 40)
        requests = {seed: asked(tiny, seed) for seed in alone}
        tiny.run()
        assert {seed: tiny.tokens(each) for seed, each in requests.items()} == alone
        assert tiny.tokens(plain) == oracle(prompt(9), 40)
        accepted = sum(o.accepted for each in requests.values() for o in tiny.of(each))
        assert bool(accepted) == any(plan)


@pytest.mark.parametrize("ahead", [False, True])
def test_beside_others_and_ahead_of_them(alone, ahead):
    with TinyEngine(grammars=Grammars(words), ahead=ahead) as tiny:
        plain = tiny.ask(prompt(9), 40)
        requests = {seed: asked(tiny, seed) for seed in alone}
        late = tiny.ask(prompt(8), 30)
        tiny.run()
        assert {seed: tiny.tokens(each) for seed, each in requests.items()} == alone
        assert tiny.tokens(plain) == oracle(prompt(9), 40)
        assert tiny.tokens(late) == oracle(prompt(8), 30)


def test_preempted_and_begun_again(alone):
    with TinyEngine(grammars=Grammars(words), ahead=True, device_pages=40) as tiny:
        requests = {seed: asked(tiny, seed) for seed in alone}
        tiny.run()
        assert tiny.scheduler.counters.preempted > 0, "there was no pressure"
        assert {seed: tiny.tokens(each) for seed, each in requests.items()} == alone


def test_random_schemas():
    rng = random.Random(11)
    with TinyEngine(grammars=Grammars(words), device_pages=400, ahead=True) as tiny:
        cases = [(random_schema(rng), seed) for seed in range(30)]
        asked_for = [
            (tiny.ask(prompt(seed), 800, stop_ids=[END], grammar=ending(schema)), schema)
            for schema, seed in cases
        ]
        tiny.run()
        for request, schema in asked_for:
            last = tiny.last(request)
            if last.finish is Finish.INVALID:  # it needs letters that this vocabulary does not have
                continue
            assert last.finish is Finish.STOP, (schema, text(tiny.tokens(request)))
            assert follows(json.loads(text(tiny.tokens(request))), schema)
