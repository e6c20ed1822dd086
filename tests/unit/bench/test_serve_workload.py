"""Workloads: what is said, how long it is, and what is left out of it."""

import json

import pytest

from quire.bench.serve.conversations import ChatWorkload, Shape, recorded, synthetic
from quire.errors import ConfigError

SHAPE = Shape(num_sessions=3, num_rounds=4, system_tokens=50, prompt_tokens=20, output_tokens=10)


def agent(place, shape):
    return recorded(ChatWorkload.AGENT, place, shape)


def mtbench(place, shape):
    return recorded(ChatWorkload.MTBENCH, place, shape)


def said(turn) -> str:
    (message,) = turn.messages
    return message["content"]


def test_synthetic_sessions_share_their_system_prompt_and_nothing_else():
    sessions = synthetic(SHAPE, 4.0, seed=1)
    assert len(sessions) == 3
    assert {len(session.turns) for session in sessions} == {4}
    (system,) = {turn["content"] for session in sessions for turn in session.opening}
    assert len(system) == 200
    texts = [said(turn) for session in sessions for turn in session.turns]
    assert len({text[:16] for text in texts}) == 12
    assert {len(text) for text in texts} == {80}
    assert {turn.max_tokens for session in sessions for turn in session.turns} == {10}


def test_synthetic_sessions_follow_from_the_seed():
    assert synthetic(SHAPE, 4.0, seed=1) == synthetic(SHAPE, 4.0, seed=1)
    assert synthetic(SHAPE, 4.0, seed=1) != synthetic(SHAPE, 4.0, seed=2)


def test_a_system_prompt_of_nothing_is_none():
    (session,) = synthetic(Shape(1, 1, system_tokens=0), 4.0, seed=1)
    assert session.opening == []


def record(folder, name, lengths):
    rows = [
        {
            "timestamp": -i,
            "messages": [{"role": "user", "content": "x" * length}],
            "session_id": name,
        }
        for i, length in enumerate(lengths)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_recorded_sessions_are_replayed_in_order_of_time(tmp_path):
    record(tmp_path, "a", [400, 300, 200, 100])
    (session,) = agent(tmp_path, Shape(num_rounds=3, output_tokens=10))
    assert [len(said(turn)) for turn in session.turns] == [100, 200, 300]
    assert all(turn.is_whole_history for turn in session.turns)


def test_questions_of_two_turns(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"question_id": 81, "turns": ["a\u2028b", "b"]}\n\n{"question_id": 82, "turns": ["c"]}\n'
    )
    sessions = mtbench(path, Shape(num_sessions=5, num_rounds=2))
    assert [[said(turn) for turn in session.turns] for session in sessions] == [
        ["a\u2028b", "b"],
        ["c"],
    ]
    assert len(mtbench(path, Shape(num_sessions=1))) == 1


WRONG_TURNS = [f'{{"question_id": 1, "turns": {turns}}}' for turns in ("[]", "7", '"ab"', "[1]")]


def test_recordings_that_are_none_are_one_sentence(tmp_path):
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"there are no sessions .* check --sessions"):
            agent(tmp_path, SHAPE)
        (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="JSON object on each line"):
        mtbench(tmp_path / "none", SHAPE)
    for text in ("{", "[]", '{"question_id": 1}', *WRONG_TURNS):
        (tmp_path / "q").write_text(text)
        with pytest.raises(ConfigError, match="line 1"):
            mtbench(tmp_path / "q", SHAPE)


def write_times(path, *times) -> None:
    said = [{"role": "user", "content": "x"}]
    rows = [{"messages": said, "session_id": None, "timestamp": time} for time in times]
    path.write_text("\n".join(map(json.dumps, rows)))


def test_recorded_requests_may_say_nothing_of_session_or_time(tmp_path):
    write_times(tmp_path / "one.jsonl", None, 2, 1)
    (session,) = agent(tmp_path, SHAPE)
    assert (session.name, len(session.turns)) == ("one", 3)


def test_times_that_have_no_order_are_one_sentence(tmp_path):
    write_times(tmp_path / "a.jsonl", "2026-01-01", None)
    with pytest.raises(ConfigError, match="give each line one of the same kind, or none"):
        agent(tmp_path, SHAPE)
