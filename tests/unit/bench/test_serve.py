"""`quire bench serve` against a small real server: what is asked, measured, summed up, shown."""

import dataclasses
import json
import threading

import pytest

from quire.bench.serve import report as serve_report
from quire.bench.serve.conversations import ChatWorkload, Shape
from quire.bench.serve.run import OfferedLoad, ServerTarget, run
from quire.errors import ConfigError, EngineError
from unit.bench.fake_server import chunk, event, usage
from unit.bench.shown import shown

SMALL = OfferedLoad(
    shape=Shape(num_sessions=3, num_rounds=4, system_tokens=64, prompt_tokens=32, output_tokens=8),
    concurrency=2,
)


def text_of(result) -> str:
    return shown(serve_report.tables(result))


def test_sessions_go_on_with_what_was_answered(fake, url):
    seen = []
    result = run(ServerTarget(url), SMALL, lambda done, of: seen.append((done, of)))
    assert (result["requests"], result["good"], result["failed"], result["malformed"]) == (
        12,
        12,
        0,
        0,
    )
    assert seen[-1] == (12, 12)
    assert [row["answers"] for row in result["rounds"]] == [3, 3, 3, 3]
    talks = [request["messages"] for request in fake.requests[1:]]  # the first one calibrates
    longest = max(talks, key=len)
    assert [message["role"] for message in longest] == [
        "system",
        *["user", "assistant"] * 3,
        "user",
    ]
    assert all(message["content"] for message in longest)
    assert {request["temperature"] for request in fake.requests} == {0}
    assert len({talk[0]["content"] for talk in talks}) == 1


def test_hits_grow_from_round_to_round(url):
    result = run(ServerTarget(url), SMALL)
    rates = [row["hit"]["all"] for row in result["rounds"]]
    assert rates == sorted(rates)
    assert rates[-1] > 0.6
    assert result["hit"]["device"] == pytest.approx(result["hit"]["all"])
    assert result["throughput"]["output_tokens_per_s"] > 0
    json.dumps(result)


def test_sessions_take_turns(fake, url):
    """A session waits for the others before its next round: round n ends before n + 2 begins."""
    run(ServerTarget(url), dataclasses.replace(SMALL, concurrency=1))
    rounds = [len(request["messages"]) // 2 for request in fake.requests[1:]]
    assert rounds == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_no_more_requests_at_a_time_than_told(fake, url):
    running, most, lock = 0, 0, threading.Lock()

    def counting(body):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        answer = fake.answer(body)
        with lock:
            running -= 1
        return answer

    fake.stream = counting
    run(ServerTarget(url), dataclasses.replace(SMALL, concurrency=2))
    assert most <= 2


def test_a_server_that_tells_nothing_has_unknown_hits(fake, url):
    fake.tells_tiers = False
    result = run(ServerTarget(url), SMALL)
    assert result["hit"] is None
    assert {row["hit"] for row in result["rounds"]} == {None}
    assert "hit rates are unknown" in text_of(result)
    assert "0.0%" not in text_of(result)


def test_failures_are_counted_and_the_rest_goes_on(fake, url):
    def moody(body):
        if len(fake.requests) % 3 == 0:
            return [event({"error": {"message": "[red]out of pages"}})]
        if len(fake.requests) % 3 == 2:
            return [event(chunk("a")), event("[DONE]")]
        return fake.answer(body)

    fake.stream = moody
    result = run(ServerTarget(url), dataclasses.replace(SMALL, concurrency=1))
    assert (result["good"], result["failed"], result["malformed"]) == (4, 4, 4)
    assert result["problems"] == {
        "[red]out of pages": 4,
        "the stream ended without finish_reason": 4,
    }
    shown = text_of(result)
    assert "4 of 12 failed" in shown
    assert "4 of 12 malformed" in shown
    assert "4 × [red]out of pages" in shown


def test_a_server_that_answers_nothing_is_an_error(fake, url):
    fake.stream = lambda body: (
        fake.answer(body) if len(fake.requests) == 1 else [event({"error": "no"})]
    )
    with pytest.raises(EngineError, match="none of 12 requests was answered: no"):
        run(ServerTarget(url), SMALL)


def test_rounds_beyond_the_context_are_left_out_and_counted(url):
    shape = Shape(num_sessions=2, num_rounds=30, system_tokens=256, prompt_tokens=512)
    result = run(ServerTarget(url), OfferedLoad(shape=shape))
    assert result["context"] == 4096
    assert result["failed"] == 0
    assert result["requests"] + result["cut"]["turns"] == 60
    assert result["cut"]["sessions"] == 2
    assert max(sample["prompt_tokens"] for sample in result["samples"]) <= 4096 - 64
    assert "turns of 2 sessions that might not fit into the model's context of 4,096" in text_of(
        result
    )


def test_a_short_context_is_measured_by_a_short_prompt(fake, url):
    run(ServerTarget(url, context=200), SMALL)
    (message,) = fake.requests[0]["messages"]  # the first one calibrates
    assert len(message["content"]) == 400


def test_a_context_can_be_given(url):
    result = run(ServerTarget(url, context=250), SMALL)
    assert (result["context"], result["cut"]["sessions"]) == (250, 3)


def test_recorded_sessions(url, tmp_path):
    history, lines = "", []
    for i in range(4):
        history += f"step {i}: " + "look around " * 60
        said = [{"role": "user", "content": history}]
        row = {"timestamp": i, "messages": said, "session_id": "a"}
        lines.append(json.dumps(row) + "\n")
    (tmp_path / "a.jsonl").write_text("".join(lines))
    shape = Shape(num_rounds=9, output_tokens=8)
    result = run(ServerTarget(url), OfferedLoad(ChatWorkload.AGENT, shape, sessions=tmp_path))
    assert (result["requests"], result["num_sessions"]) == (4, 1)
    assert result["rounds"][-1]["hit"]["all"] > 0.5


def test_recorded_requests_that_do_not_fit_are_left_out_and_counted(fake, url, tmp_path):
    for name, lengths in {"a": [800, 8000, 3900, 1200], "b": [800], "c": [9000]}.items():
        rows = [
            {"messages": [{"role": "user", "content": str(at) * length}], "session_id": name}
            for at, length in enumerate(lengths)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = OfferedLoad(ChatWorkload.AGENT, Shape(output_tokens=8), sessions=tmp_path)
    seen = []
    target = ServerTarget(url, context=1024)
    result = run(target, load, lambda done, of: seen.append((done, of)))
    asked = sorted(len(request["messages"][0]["content"]) for request in fake.requests[1:])
    assert asked == [800, 800, 1200]
    assert (result["num_sessions"], result["cut"]) == (2, {"turns": 3, "sessions": 2})
    assert seen[-1] == (6, 6)
    with pytest.raises(ConfigError, match="nothing of it fits into 100 tokens"):
        run(ServerTarget(url, context=100), load)


def test_agents_own_requests_and_what_of_them_was_reused(fake, url, tmp_path):
    """Two sessions of three turns: one goes on, one has its tools in another order at the end."""
    tools = [{"type": "function", "function": {"name": name * 40}} for name in "ab"]
    said = [{"role": "user", "content": f"{i} says something of some length. " * 8} for i in "xyz"]
    rows = []
    for session in "st":
        for turn in (1, 2, 3):
            moved = session == "t" and turn == 3
            start = [{"role": "system", "content": session * 90}]
            rows.append(
                {
                    "session_id": session,
                    "messages": start + said[:turn],
                    "tools": tools[::-1] if moved else tools,
                }
            )
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(
        ServerTarget(url), OfferedLoad(ChatWorkload.AGENT, Shape(output_tokens=4), 1, sessions=path)
    )
    sent = fake.requests[1:]
    assert sorted(json.dumps(each["tools"]) for each in sent) == sorted(
        json.dumps(row["tools"]) for row in rows
    )
    reuse = result["reuse"]
    assert reuse["turns"] == 6
    assert 0.8 < reuse["share"] <= 1
    (broken,) = reuse["broken"]
    assert broken["reason"] == "the tools came in another order"
    assert "Reused: " in text_of(result)
    assert "the tools came in another order" in text_of(result)


def test_the_key_is_sent(fake, url):
    run(ServerTarget(url + "/v1/", api_key="k"), SMALL)
    assert fake.keys == {"Bearer k"}


def test_what_cannot_be_asked_is_one_sentence(fake, url):
    with pytest.raises(ConfigError, match="--model 'other' is not served there: use fake"):
        run(ServerTarget(url, model="other"), SMALL)
    with pytest.raises(ConfigError, match="give --sessions, a directory"):
        run(ServerTarget(url), OfferedLoad(ChatWorkload.AGENT))
    with pytest.raises(EngineError, match="cannot be reached"):
        run(ServerTarget("http://127.0.0.1:9"), SMALL)
    with pytest.raises(EngineError, match="answers 404"):
        run(ServerTarget(url + "/elsewhere"), SMALL)
    fake.status_code = 500
    with pytest.raises(EngineError, match="500 too busy"):
        run(ServerTarget(url), SMALL)


def test_a_list_of_models_that_is_none_is_one_sentence(fake, url):
    fake.models = [{"id": 5}]
    with pytest.raises(ConfigError, match="--model 'other' is not served there: use 5"):
        run(ServerTarget(url, model="other"), SMALL)
    for listed in ([5], [{"name": "x"}]):
        fake.models = listed
        with pytest.raises(EngineError, match="does not list its models"):
            run(ServerTarget(url), SMALL)
    fake.models = []
    with pytest.raises(EngineError, match="load one there first"):
        run(ServerTarget(url), SMALL)


def test_prompts_without_usage_are_unknown_not_zero(fake, url):
    def terse(body):
        if len(fake.requests) == 1:
            return [event(chunk("a", "stop")), event(usage(1000, 1)), event("[DONE]")]
        return [event(chunk("a", "stop")), event("[DONE]")]

    fake.stream = terse
    result = run(ServerTarget(url), SMALL)
    assert result["prompt_tokens"] is None
    assert result["throughput"]["input_tokens_per_s"] is None
    assert "unknown" in text_of(result)
