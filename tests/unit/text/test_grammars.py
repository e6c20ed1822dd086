"""What an answer must follow: for every format, what it lets a model write and what it does not."""

import json
import time

import pytest

from quire.engine.grammar import CompileStage, Grammars
from quire.engine.grammar.compiling import Words
from quire.engine.messages import Finish
from quire.text.grammars import MAX_SCHEMA_CHARS, hold
from quire.text.messages import Conversation, Function, Message, Tool
from quire.text.prompting import Prompting
from quire.text.tools import formats
from unit.server.scripted import TEMPLATE, Rig, ScriptedEngine, TinyTokenizer, error_of
from unit.server.test_tools import NATIVE, WEATHER, rig_of

llguidance = pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    Tool(type="function", function=Function(name="get", parameters=CITY, strict=True)),
    Tool(type="function", function=Function(name="put", parameters=CITY)),
]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
HELD = [name for name, each in formats().items() if each.ending is not None]


class Model:
    """A model that writes calls in one format: its tokenizer, and how its answers are read."""

    def __init__(self, parser="hermes", template=NATIVE, *, special=True, thinks=False):
        marks = formats()[parser].markers if special else ()
        thought = ["</think>"] if thinks else []
        self.tokenizer = TinyTokenizer(template, special=[*marks, *thought])
        self.prompting = Prompting(self.tokenizer, tool_parser=parser)
        self.reading = self.prompting.reading
        self.eos = self.tokenizer.eos_token_id

    def hold(self, schema=None, tools=(), **options):
        conversation = Conversation(
            [Message(role="user", content="hi")],
            tools,
            must_call=options.pop("must_call", False),
            function=options.pop("function", None),
        )
        defaults = {"is_thinking": False, "calls": bool(tools), "is_one_call": False}
        return hold(self.reading, conversation, schema, **defaults | options)

    def takes(self, grammar: str, text: str) -> bool:
        """Whether a model that follows the grammar can write this, and end there."""
        backend = self.tokenizer.backend_tokenizer

        def words() -> Words:
            size = backend.get_vocab_size()
            tokenizer = llguidance.LLTokenizer(backend.to_str(), n_vocab=size)
            return Words(tokenizer, size, tokenizer.eos_tokens)

        compiled = Grammars(words).ask(grammar)
        while compiled.stage is CompileStage.PENDING:
            time.sleep(0.001)
        assert compiled.stage is CompileStage.READY, compiled.error
        place = compiled.begin([self.eos])
        written = [*backend.encode(text, add_special_tokens=False).ids, self.eos]
        return all(place.advance(token) for token in written)


def call(form, name, arguments):
    return f"{form.opening(name)} {json.dumps(arguments)}{form.ending}"


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", HELD)
def test_a_call_that_must_be_made(name, special):
    model, form = Model(name, special=special), formats()[name]
    begun = len(form.opening(None))
    grammar = model.hold(tools=TOOLS, must_call=True)
    good = call(form, "get", {"city": "Rome"})
    assert model.takes(grammar, good[begun:])
    assert model.takes(grammar, call(form, "put", {"anything": [1, {}]})[begun:])
    assert not model.takes(grammar, call(form, "get", {"city": "Bonn"})[begun:])
    assert not model.takes(grammar, call(form, "get", {})[begun:])
    assert not model.takes(grammar, call(form, "other", {})[begun:])
    assert not model.takes(grammar, good[begun:-3])
    assert not model.takes(grammar, "")
    assert not model.takes(grammar, "I do not want to.")


@pytest.mark.parametrize("name", HELD)
def test_a_function_that_must_be_called(name):
    model, form = Model(name), formats()[name]
    grammar = model.hold(tools=TOOLS, must_call=True, function="get")
    begun = len(form.opening("get"))
    assert model.takes(grammar, call(form, "get", {"city": "Oslo"})[begun:])
    assert not model.takes(grammar, call(form, "get", {"city": 3})[begun:])


@pytest.mark.parametrize("name", [name for name in HELD if formats()[name].between is not None])
def test_several_calls_unless_one_is_wanted(name):
    model, form = Model(name), formats()[name]
    begun = len(form.opening(None))
    both = call(form, "get", {"city": "Rome"}) + form.between + call(form, "put", {})
    assert model.takes(model.hold(tools=TOOLS, must_call=True), both[begun:])
    one = model.hold(tools=TOOLS, must_call=True, is_one_call=True)
    assert not model.takes(one, both[begun:])


@pytest.mark.parametrize("name", HELD)
def test_what_a_grammar_allows_is_read_as_calls(name):
    """The parser of the same format finds the call in what the grammar lets through."""
    form = formats()[name]
    parser = form.parser({"get": CITY, "put": CITY})
    text = call(form, "get", {"city": "Rome"})
    found = parser.push(text) + parser.finish()
    assert [(each.name, json.loads(each.arguments)) for each in found] == [
        ("get", {"city": "Rome"})
    ]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", [name for name in HELD if formats()[name].trigger])
def test_strict_functions_among_text(name, special):
    model, form = Model(name, special=special), formats()[name]
    grammar = model.hold(tools=TOOLS)
    good, bad = call(form, "get", {"city": "Rome"}), call(form, "get", {"city": "Bonn"})
    assert model.takes(grammar, "Just text {}[].\n")
    assert model.takes(grammar, "")
    assert model.takes(grammar, f"I look. {good}")
    assert model.takes(grammar, f"{good}\n{good} and more")
    assert not model.takes(grammar, f"I look. {bad}")
    assert not model.takes(grammar, f"{good}\n{bad}")


def test_nothing_is_held_without_a_reason():
    loose = [TOOLS[1]]
    assert Model().hold(tools=loose) == ""
    assert Model().hold() == ""
    assert Model("qwen-xml").hold(tools=TOOLS, must_call=True) == ""
    assert Model("llama3").hold(tools=TOOLS) == "", "nothing tells a call from text there"


# ---- formats of answers --------------------------------------------------------------------------


def test_an_answer_of_a_schema():
    model = Model()
    grammar = model.hold(SCHEMA)
    assert model.takes(grammar, '{"n": 1}')
    assert model.takes(grammar, '{\n  "n" : 1, "more": [true, "é"]\n}')
    for bad in ('{"n": "1"}', "{}", 'Sure: {"n": 1}', '{"n": 1} ok', "<tool_call>"):
        assert not model.takes(grammar, bad)


def test_a_schema_or_calls():
    model = Model()
    grammar = model.hold(SCHEMA, TOOLS)
    assert model.takes(grammar, '{"n": 1}')
    assert model.takes(grammar, call(formats()["hermes"], "get", {"city": "Rome"}))
    assert not model.takes(grammar, call(formats()["hermes"], "get", {"city": "Bonn"}))
    assert not model.takes(model.hold(SCHEMA, TOOLS, calls=False), "<tool_call>")


def test_calls_that_are_not_json_beside_a_schema():
    model = Model("qwen-xml")
    grammar = model.hold(SCHEMA, TOOLS)
    assert model.takes(grammar, "<tool_call>\n<function=get>anything")
    assert model.takes(grammar, '{"n": 1}')
    assert not model.takes(grammar, "text")


@pytest.mark.parametrize("thinks", [False, True])
def test_reasoning_comes_before_the_schema(thinks):
    """Whether the end of reasoning is a token of the model or text."""
    model = Model(template=NATIVE + "{# </think> #}", thinks=thinks)
    opened = model.hold(SCHEMA, is_thinking=True)
    assert model.takes(opened, 'hm, {"n"?\n</think>\n\n{"n": 1}')
    assert not model.takes(opened, '{"n": 1}')
    assert not model.takes(opened, 'hm</think>so: {"n": 1}')
    own = model.hold(SCHEMA)
    assert model.takes(own, '<think>\nhm\n</think>\n\n{"n": 1}')
    assert model.takes(own, '{"n": 1}')
    assert not model.takes(own, 'hm</think>{"n": 1}')


def test_channels():
    model = Model("harmony", TEMPLATE + "{# <|channel|> #}")
    grammar = model.hold(SCHEMA, TOOLS)
    final = '<|channel|>final<|message|>{"n": 1}'
    assert model.takes(grammar, final)
    assert model.takes(grammar, f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{final}")
    assert model.takes(grammar, call(formats()["harmony"], "get", {"city": "Rome"}))
    assert not model.takes(grammar, '<|channel|>final<|message|>{"n": "x"}')
    assert not model.takes(grammar, '{"n": 1}')


@pytest.mark.parametrize("extra", [{}, {"minimum": 0}, {"exclusiveMinimum": 0}, {"maximum": 99.5}])
@pytest.mark.parametrize("kind", ["number", "integer", ["number", "null"]])
def test_numbers_come_to_an_end(kind, extra):
    """A small model that likes zeros is not cut off by max_tokens."""
    model = Model()
    grammar = model.hold({"type": kind} | extra)
    assert model.takes(grammar, "7")
    assert model.takes(grammar, "1.125") == ("number" in kind)
    assert not model.takes(grammar, "1" + "0" * 40)
    assert not model.takes(grammar, "1." + "0" * 40)


@pytest.mark.parametrize(
    ("schema", "number"),
    [
        ({"type": "number", "minimum": 1e-8, "maximum": 2e-8}, "0.000000015"),
        ({"type": "integer", "minimum": 10**16}, "20000000000000000"),
        ({"type": "number", "enum": [1e-12, 3]}, "3"),
        ({"type": "number", "multipleOf": 0.5}, "2.5"),
        ({"allOf": [{"type": "number", "multipleOf": 0.5}, {"type": "number"}]}, "2.5"),
        ({"allOf": [{"type": "number"}, {"type": "integer", "minimum": 3}]}, "4"),
    ],
)
def test_numbers_that_a_schema_describes_are_as_it_says(schema, number):
    model = Model()
    assert model.takes(model.hold(schema), number)


def test_formats_that_say_nothing_are_passed_over():
    model = Model()
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "binary"}},
        "required": ["format"],
        "additionalProperties": False,
    }
    grammar = model.hold(schema)
    assert model.takes(grammar, '{"format": "x"}')
    assert not model.takes(grammar, '{"other": "x"}')
    dated = model.hold({"type": "string", "format": "date"})
    assert not model.takes(dated, '"x"')


# ---- requests ------------------------------------------------------------------------------------


def test_the_engine_is_told():
    rig = rig_of('{"n": 1}')
    body = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert rig.chat(response_format=body).status_code == 200
    params = rig.engine.calls[-1].params
    assert '"integer"' in params.grammar
    assert rig.chat(response_format=body, ignore_eos=True).status_code == 200
    assert rig.engine.eos in rig.engine.calls[-1].params.stop_ids, "or it would never end"
    assert rig.chat(response_format={"type": "json_object"}).status_code == 200
    assert rig.engine.calls[-1].params.grammar
    assert rig.chat(response_format={"type": "text"}, tools=[WEATHER]).status_code == 200
    assert not rig.engine.calls[-1].params.grammar


@pytest.mark.parametrize(
    "wrong",
    [
        "json",
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": []}},
        {"type": "json_schema", "json_schema": []},
    ],
)
def test_a_format_that_is_none(rig: Rig, wrong):
    response = rig.chat(response_format=wrong)
    assert (response.status_code, error_of(response)["param"]) == (400, "response_format")


def test_schemas_that_are_too_large_or_too_deep(rig: Rig):
    deep: object = {}
    for _ in range(100):
        deep = {"items": deep}
    large = {"description": "x" * MAX_SCHEMA_CHARS}
    for schema in (deep, large):
        body = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        response = rig.chat(response_format=body)
        assert (response.status_code, error_of(response)["param"]) == (400, "response_format")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_compiled(engine: ScriptedEngine, stream):
    engine.replies = lambda call: []
    engine.end = (Finish.INVALID, 'Unimplemented keys: ["not"]')
    response = Rig(engine).chat(response_format={"type": "json_object"}, stream=stream)
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "invalid_schema"
    assert '["not"]' in error["message"]


def test_the_format_of_a_response():
    rig = rig_of('{"n": 1}')
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    body = {"model": "tiny", "input": "hi", "text": {"format": form}}
    response = rig.request("POST", "/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert '"integer"' in rig.engine.calls[-1].params.grammar
    assert response.json()["text"]["format"] == form
    body["text"] = {"format": {"type": "json_schema"}}
    assert rig.request("POST", "/v1/responses", json=body).status_code == 400
