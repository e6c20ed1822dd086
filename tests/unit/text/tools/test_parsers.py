"""Every format: what was written is read again, however it is cut; what is none stays text."""

import json
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.text import tools
from quire.text.tools import formats
from quire.text.tools.base import Call, Malformed, Reasoning, Text
from unit.text.tools.writers import CASES, parsed

EVERY = pytest.mark.parametrize("name", CASES)
MARKS = [
    *{mark for each in formats().values() for mark in each.markers},
    "{", "}", '"', "\\", "[", "]", "call:f", '{"name": "f", "arguments": {}}', "functions.f", "to=",
    "```", "json", "tool_code", "\n", " ", ";", "f()", "<function=f>", "</function>", "analysis",
]  # fmt: skip
JUNK = st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=12).map("".join)


def cut(text, places):
    """`text` in pieces, cut at these places."""
    ends = [*sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def calls_of(events):
    return [(e.name, json.loads(e.arguments)) for e in events if isinstance(e, Call)]


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, Text))


@EVERY
def test_what_was_written_is_read_wherever_it_is_cut(name):
    case = CASES[name]

    @settings(max_examples=25, deadline=None)
    @given(case.calls, st.lists(st.integers(0, 10**6), max_size=8))
    def holds(calls, places):
        text = case.write(calls)
        for pieces in ([text], list(text), cut(text, places)):
            events = parsed(case.format, pieces)
            assert calls_of(events) == [(n, given) for n, given in calls]
            assert text_of(events) == ""
            assert not any(isinstance(event, Malformed) for event in events)

    holds()


@EVERY
def test_every_cut_in_two_is_the_same(name):
    case = CASES[name]
    if name == "qwen-xml":
        calls = [("f", {"x": "a b", "y": ""}), ("search", {})]
    else:
        calls = [("f", {"x": ['"', "é"], "y": {"z": -1.5}}), ("search", {})]
    lead = "Let me see: " if case.leads else ""
    text = lead + case.write(calls)
    whole = parsed(case.format, [text])
    assert calls_of(whole) == calls
    assert text_of(whole) == lead
    for at in range(len(text)):
        assert parsed(case.format, [text[:at], text[at:]]) == whole


@EVERY
def test_junk_is_read_alike_however_it_is_cut_and_loses_nothing(name):
    format = CASES[name].format

    @settings(max_examples=60, deadline=None)
    @given(JUNK, st.lists(st.integers(0, 10**6), max_size=8))
    @example('<tool_call>{"name": "<tool_call>{', [])
    @example("<tool_call><tool_call>", [])
    def holds(text, places):
        whole = parsed(format, [text])
        assert parsed(format, list(text)) == whole
        assert parsed(format, cut(text, places)) == whole
        if format != "harmony" and not calls_of(whole):
            assert text_of(whole) == text

    holds()


@EVERY
def test_a_call_that_breaks_off_is_text(name):
    case = CASES[name]
    text = case.write([("f", {"x": "abc"})])
    for end in range(1, len(text)):
        events = parsed(case.format, [text[:end]])
        assert all(given == {"x": "abc"} for _, given in calls_of(events))
        if not calls_of(events) and case.format != "harmony":
            assert text_of(events) == text[:end]


@EVERY
def test_without_tools_there_are_no_calls(name):
    case = CASES[name]
    text = case.write([("f", {"x": "abc"})])
    events = parsed(case.format, list(text), {})
    assert not calls_of(events)
    assert text_of(events) == (text if case.format != "harmony" else '{"x": "abc"}')


@EVERY
def test_an_opening_leads_into_a_call(name):
    """What an answer is made to begin with is what its parser reads."""
    format = formats()[CASES[name].format]
    opening = format.opening("f")
    rest = {
        "llama3": ' {"x": 1}}', "json": ' {"x": 1}}', "hermes": ' {"x": 1}}\n</tool_call>',
        "mistral": ' {"x": 1}}]', "mistral-args": '{"x": 1}', "harmony": '{"x": 1}',
        "functiongemma": "x:1}<end_function_call>", "gemma4": "x:1}<tool_call|>",
        "tool_code": "x=1)\n```",
        "qwen-xml": "\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    }[format.name]  # fmt: skip
    tools = {"f": {"properties": {"x": {"type": "integer"}}}}
    assert parsed(format.name, [opening, rest], tools) == [Call("f", '{"x": 1}')]


@EVERY
def test_a_long_answer_of_openings_takes_no_longer_than_its_length(name):
    """Openings without end: each is looked at a few times, not as often as there are others."""
    format = formats()[CASES[name].format]
    for unit in (*format.markers, '{"', '"1', "{", "[", format.opening("f"), format.opening(None)):
        text = unit * (50_000 // len(unit))
        events = parsed(format.name, [text])
        if format.name != "harmony":
            assert text_of(events) == text


# ---- single formats ------------------------------------------------------------------------------


def hermes(text):
    return parsed("hermes", list(text))


def test_arguments_keep_the_models_own_writing():
    written = '{"b":1,  "a": "\\u00e9"}'
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    assert hermes(text) == [Call("f", written)]


def test_text_around_calls():
    text = 'Well.\n<tool_call>{"name": "f"}</tool_call>\nAnd so on.'
    assert hermes(text) == [Text("Well."), Call("f", "{}"), Text("\nAnd so on.")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("nonsense", "not_json"),
        ('{"name": "f", "arguments": [1]}', "no_arguments"),
        ('{"name": "f", "arguments": "x"}', "not_json"),
        ('{"arguments": {}}', "no_name"),
        ('{"name": 5}', "no_name"),
        ('{"name": "f", "arguments": {"x": }}', "not_json"),
        ('{"name": "f", "arguments": {"x": NaN}}', "not_json"),
        ('{"name": "f", "arguments": {"x": 1', "not_json"),
    ],
)
def test_what_is_wrong_has_a_reason_and_the_next_call_is_found(body, reason):
    text = f"<tool_call>{body}</tool_call>"
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    malformed, *rest = hermes(text + good)
    assert malformed == Malformed(reason)
    assert rest == [Text(text), Call("f", "{}")]


def test_deep_nesting_is_text():
    text = '<tool_call>{"name": "f", "arguments": ' + "[" * 50_000 + "]" * 50_000 + "}</tool_call>"
    events = hermes(text)
    assert (calls_of(events), text_of(events)) == ([], text)


def test_raw_line_ends_in_strings_are_taken():
    (call,) = hermes('<tool_call>{"name": "f", "arguments": {"x": "a\nb"}}</tool_call>')
    assert json.loads(call.arguments) == {"x": "a\nb"}


def test_openais_own_form_is_taken():
    inner = '{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}'
    assert parsed("json", [inner]) == [Call("f", '{"x": 1}')]


@pytest.mark.parametrize("format", ["llama3", "json"])
def test_json_that_names_no_function_is_an_answer(format):
    text = '{"name": "Bob", "parameters": {"age": 5}}'
    assert parsed(format, list(text)) == [Malformed("unknown_function"), Text(text)]


def test_xml_values_are_what_the_schema_says():
    tools = {"f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}
    text = (
        "<tool_call><function=f><parameter=n>5</parameter><parameter=s>5</parameter>"
        "</function></tool_call>"
    )
    (call,) = parsed("qwen-xml", [text], tools)
    assert json.loads(call.arguments) == {"n": 5, "s": "5"}


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("f(x=1)", {"x": 1}),
        ("print(f(x=-1.5))", {"x": -1.5}),
        ("default_api.f(x='a')", {"x": "a"}),
        ("f('a', y=[1, (2,)])", {"x": "a", "y": [1, [2]]}),
    ],
)
def test_code_is_read_not_run(code, arguments):
    tools = {"f": {"properties": {"x": {}, "y": {}}}}
    (call,) = parsed("tool_code", [f"```tool_code\n{code}\n```"], tools)
    assert (call.name, json.loads(call.arguments)) == ("f", arguments)


@pytest.mark.parametrize(
    "code",
    ["x = f()", "f(x=open('a'))", "f(**{})", "f(x=1e999)", "f(x={1: 2})", "f(x=b'')", "f(", "\0",
     "", "f(1, 2, 3)", "(lambda: 1)()", "f(x=" + "(" * 500 + "1" + ")" * 500 + ")", "f()[0]"],
)  # fmt: skip
def test_code_that_is_more_than_calls_is_text(code):
    text = f"```tool_code\n{code}\n```"
    events = parsed("tool_code", [text])
    assert (calls_of(events), text_of(events)) == ([], text)


def test_channels():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"x": 1}<|call|>'
    )
    assert parsed("harmony", list(text)) == [
        Reasoning("Hm."),
        Text("I will look."),
        Call("f", '{"x": 1}'),
    ]
    final = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    )
    assert parsed("harmony", list(final), {}) == [Reasoning("Hm."), Text("Yes")]
    assert parsed("harmony", list("Just text.")) == [Text("Just text.")]


class Entry:
    """As importlib.metadata finds it for an installed package."""

    name = "theirs"

    def __init__(self, loaded):
        self.loaded = loaded

    def load(self):
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def test_formats_of_other_packages_are_found(monkeypatch):
    theirs = replace(formats()["hermes"], name="theirs")
    monkeypatch.setattr(tools, "entry_points", lambda group: [Entry(theirs)] if group else [])
    assert formats()["theirs"] is theirs
    assert tools.choose("theirs", "", (), native=True) is theirs
    assert formats().keys() > {"hermes", "json"}


@pytest.mark.parametrize("loaded", [ImportError("no"), object()])
def test_a_format_that_is_none_is_said_to_be(monkeypatch, loaded):
    monkeypatch.setattr(tools, "entry_points", lambda group: [Entry(loaded)])
    with pytest.raises(ConfigError, match="'theirs'"):
        formats()
