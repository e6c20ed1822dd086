"""Reasoning apart from the answer, and which parser a model gets."""

import pytest

from quire.errors import ConfigError
from quire.text.tools import AUTO, Thinking, choose, formats
from quire.text.tools.base import Call, Plain, Reasoning, Text, merged
from quire.text.tools.reasoning import CHANNEL


def thought(text, *, is_open=False, rest=None):
    found = set()
    for pieces in ([text], list(text), [text[:5], text[5:]]):
        parser = Thinking(rest() if rest else Plain(), is_open=is_open)
        events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
        found.add(tuple(merged(events)))
    (events,) = found
    return list(events)


@pytest.mark.parametrize(
    ("text", "is_open", "events"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nYes.", False, [Reasoning("Hm.\n\nSo."), Text("Yes.")]),
        ("\nHm.\n</think>\n\nYes.", True, [Reasoning("Hm."), Text("Yes.")]),
        ("<think>\n\n</think>\n\nYes.", False, [Text("Yes.")]),
        ("<think>Hm", False, [Reasoning("Hm")]),
        ("Hm", True, [Reasoning("Hm")]),
        ("Yes <think>no</think>", False, [Text("Yes <think>no</think>")]),
        (" <thin", False, [Text(" <thin")]),
        ("a </thin b", True, [Reasoning("a </thin b")]),
        ("", False, []),
        ("\n", True, []),
    ],
)
def test_reasoning_stands_apart(text, is_open, events):
    assert thought(text, is_open=is_open) == events


def test_other_bounds():
    for pieces in (
        ["<|channel>thought\nHm.\n<channel|>Yes."],
        list("<|channel>thought\nHm.<channel|>Yes."),
    ):
        parser = Thinking(Plain(), is_open=False, bounds=CHANNEL)
        events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
        assert merged(events) == [Reasoning("Hm."), Text("Yes.")]


def test_a_call_is_found_behind_reasoning_and_not_in_it():
    def rest():
        return formats()["hermes"].parser({"f": {}})

    call = '<tool_call>{"name": "f"}</tool_call>'
    found = thought(f"<think>{call}</think>\n\n{call}", rest=rest)
    assert found == [Reasoning(call), Call("f", "{}")]


@pytest.mark.parametrize(
    ("template", "special", "native", "name"),
    [
        ("{{ tools }} <tool_call>", [], True, "hermes"),
        ("{{ tools }} <tool_call><function=", [], True, "qwen-xml"),
        ("{{ tools }}", ["<|python_tag|>"], True, "llama3"),
        ("{{ tools }} [TOOL_CALLS]", [], True, "mistral"),
        ("{{ tools }} [TOOL_CALLS] [ARGS]", [], True, "mistral-args"),
        ("{{ tools }} <start_function_call>", [], True, "functiongemma"),
        ("{{ tools }} <|tool_call>", [], True, "gemma4"),
        ("{{ tools }} <|channel|>", [], True, "harmony"),
        ("{{ tools }}", [], True, "json"),
        ("", ["<|python_tag|>"], False, "hermes"),
    ],
)
def test_a_models_template_says_which_it_is(template, special, native, name):
    assert choose(AUTO, template, special, native=native).name == name


def test_a_parser_may_be_named():
    assert choose("llama3", "<tool_call>", [], native=True).name == "llama3"
    with pytest.raises(ConfigError, match="tool_parser 'x' is not known: functiongemma"):
        choose("x", "", [], native=True)
