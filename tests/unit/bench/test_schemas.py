"""`quire bench schemas`: what counts as valid, and how it is told."""

import asyncio
import contextlib
import random

import pytest

from evidence.schemas import report, valid
from evidence.schemas.cases import follows, random_schema
from quire.engine.messages import Finish, Output
from quire.types import RequestId


class Letters:
    """A tokenizer: a token is a character."""

    chat_template = None
    eos_token_id = 0

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(token) for token in tokens if token)


class Saying:
    """An engine that says the same to everybody."""

    def __init__(self, text, finish):
        self.text, self.finish = text, finish
        self.grammars = []

    @contextlib.asynccontextmanager
    async def generate(self, prompt, params, *, timeout_s):
        self.grammars.append(params.grammar)

        async def outputs():
            yield Output(RequestId("r"), [ord(letter) for letter in self.text])
            yield Output(RequestId("r"), [0], finish=self.finish)

        yield outputs()


def checked(text, finish=Finish.STOP, count=40):
    engine, said = Saying(text, finish), []
    asked = valid.Asked(count=count, seed=3, depth=0)
    found = asyncio.run(
        valid.check(engine, Letters(), asked, lambda what, done, of: said.append((done, of)))
    )
    assert said == [(i + 1, count) for i in range(count)]
    assert all(grammar.startswith("start: %json ") for grammar in engine.grammars)
    return found


def test_an_answer_counts_if_it_follows_its_schema():
    rng = random.Random(3)
    schemas = [random_schema(rng, 0) for _ in range(40)]
    expected = [i for i, schema in enumerate(schemas) if not follows(7, schema)]
    found = checked("7")
    assert 0 < found["valid"] < 40
    assert sorted(each["number"] for each in found["wrong"]) == expected


@pytest.mark.parametrize(("text", "finish"), [("7", Finish.LENGTH), ('{"a', Finish.STOP)])
def test_what_is_cut_off_or_no_json_does_not(text, finish):
    found = checked(text, finish)
    assert found["valid"] == 0
    assert len(found["wrong"]) == 40


def test_the_tables_say_what_was_found():
    result = {
        "device": "cpu",
        "load_average": 1.0,
        "cost": {"8": {"plain": 10.0, "held": 11.0, "ratio": 1.1}},
        "stall_ms": {
            "alone": 12.0,
            "hard": {"longest_ms": 13.0, "answer_s": 1.0, "refused": "too large"},
        },
        "random": checked('[/"'),
    }
    *tables, said, wrong = report.tables(result)[:4]
    assert [table.row_count for table in tables] == [1, 2]
    assert str(said).startswith("0 of 40 answers")
    assert "schema 0" in str(wrong)
