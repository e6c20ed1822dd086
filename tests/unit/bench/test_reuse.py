"""What turns could have reused, and what broke it; and the recordings that are replayed for it."""

import json

import pytest

from quire.bench.serve import reuse
from quire.bench.serve.chatting import ChatAnswer, Verdict
from quire.bench.serve.conversations import ChatWorkload, Shape, recorded
from quire.bench.serve.reuse import Reuse
from quire.errors import ConfigError

SYSTEM = {"role": "system", "content": "be brief"}
HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in "ab"]
PROMPT = list(range(100))


def turn(found, session, messages, tools, prompt, *, reached=0, at=None):
    """How much of it was possible."""
    before = found.possible_tokens
    answer = ChatAnswer(
        Verdict.GOOD, cached={"device": reached}, prompt_ids=prompt, output_ids=[7, 7]
    )
    found.add(session, messages, tools, answer, found.num_computed if at is None else at)
    return found.possible_tokens - before


def test_a_turn_that_goes_on_shares_the_prompt_and_the_answer():
    found = Reuse()
    assert turn(found, "s", [HELLO], TOOLS, PROMPT) == 0
    assert turn(found, "s", [HELLO, ANSWER, HELLO], TOOLS, [*PROMPT, 7, 7, 1, 2], reached=96) == 102
    result = found.result()
    assert (result["possible_tokens"], result["reached_tokens"]) == (102, 96)
    assert result["share"] == pytest.approx(96 / 102)
    assert result["broken"] == []


def test_other_sessions_are_found_too_and_one_token_is_left_to_compute():
    found = Reuse()
    turn(found, "s", [HELLO], [], PROMPT)
    assert turn(found, "t", [HELLO], [], PROMPT) == 99


def test_what_was_not_computed_when_it_was_asked_is_not_possible():
    found = Reuse()
    before = found.num_computed
    turn(found, "s", [HELLO], [], PROMPT)
    assert turn(found, "t", [HELLO], [], PROMPT, at=before) == 0


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([SYSTEM, HELLO, ANSWER, HELLO], TOOLS[::-1], reuse.REORDERED),
        ([SYSTEM, HELLO, ANSWER, HELLO], TOOLS[:1], reuse.OTHER_TOOLS),
        ([SYSTEM | {"content": "it is noon"}, HELLO, ANSWER], TOOLS, reuse.SYSTEM),
        ([SYSTEM, HELLO | {"content": "hullo"}, ANSWER], TOOLS, reuse.HISTORY),
        ([SYSTEM], TOOLS, reuse.HISTORY),
        ([SYSTEM, HELLO, ANSWER, HELLO], TOOLS, reuse.TEMPLATE),
    ],
)
def test_what_broke_it_is_named(messages, tools, reason):
    found = Reuse()
    turn(found, "s", [SYSTEM, HELLO], TOOLS, PROMPT)
    turn(found, "s", messages, tools, [*PROMPT[:40], 500, *PROMPT[41:]])
    assert found.result()["broken"] == [{"reason": reason, "turns": 1, "tokens": 60}]


def test_the_very_end_of_a_prompt_may_change():
    found = Reuse()
    turn(found, "s", [HELLO], [], PROMPT)
    turn(found, "s", [HELLO, ANSWER], [], [*PROMPT[:90], 500, 501])
    assert found.result()["broken"] == []


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_users_own_file(tmp_path):
    rows = [
        {"messages": [HELLO], "tools": TOOLS, "session_id": "a"},
        {"messages": [SYSTEM, HELLO], "session_id": "b"},
        {"messages": [HELLO, ANSWER, HELLO], "tools": TOOLS, "session_id": "a"},
    ]
    one, other = recorded(ChatWorkload.AGENT, write(tmp_path / "own.jsonl", rows), Shape())
    assert (one.name, [len(each.messages) for each in one.turns]) == ("a", [1, 3])
    assert one.turns[0].tools == TOOLS
    assert (other.name, other.turns[0].tools) == ("b", [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "is no object"),
        ('{"messages": []}', "no messages that are a chat"),
        ('{"messages": [1]}', "no messages that are a chat"),
        ('{"messages": [{"role": "user"}], "tools": 5}', "no messages that are a chat"),
        ('{"input": "x"}', "no messages that are a chat"),
        ("", "there are no sessions"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, problem):
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        recorded(ChatWorkload.AGENT, path, Shape())
    with pytest.raises(ConfigError, match=r"cannot read .*nothing"):
        recorded(ChatWorkload.AGENT, tmp_path / "nothing", Shape())
