"""Transcript: whatever was delivered, a replay adds the rest and nothing twice."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.router.transcript import Diverged, Failed, Transcript


def chat(text: str | None = None, index: int = 0, finish: str | None = None, **more) -> dict:
    delta = {} if text is None else {"content": text}
    choice = {"index": index, "delta": delta | more, "logprobs": None, "finish_reason": finish}
    return {"id": "a", "created": 1, "choices": [choice]}


def encoded(chunk) -> bytes:
    return chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()


def take(transcript: Transcript, stream: list) -> str:
    """What a client gets, as text."""
    out = ""
    for chunk in stream:
        event = transcript.take(encoded(chunk))
        if event is not None and b"[DONE]" not in event:
            got = json.loads(event.removeprefix(b"data: "))
            assert got["id"] == "a"
            out += "".join(c["delta"].get("content", "") for c in got["choices"])
    return out


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


places = st.lists(st.integers(0, 40), max_size=8)


@given(st.text(max_size=40), places, places, st.integers(0, 10))
def test_however_the_pieces_are_cut_the_client_gets_the_text_once(text, one, other, lost_after):
    opening = chat("", role="assistant")
    first = [opening, *map(chat, cut(text, one))][:lost_after]
    second = [opening, *map(chat, cut(text, other)), chat(finish="stop"), b"[DONE]"]
    transcript = Transcript()
    got = take(transcript, first)
    transcript.replay()
    got += take(transcript, second)
    assert got == text
    assert transcript.is_done


def test_a_replay_keeps_the_first_heading():
    transcript = Transcript()
    transcript.take(encoded(chat("ab")))
    transcript.replay()
    event = transcript.take(encoded(chat("abc") | {"id": "b", "created": 2}))
    assert event is not None
    got = json.loads(event.removeprefix(b"data: "))
    assert (got["id"], got["created"]) == ("a", 1)
    assert got["choices"][0]["delta"] == {"content": "c"}


@pytest.mark.parametrize(
    "replay",
    [
        [chat("xyz")],
        [chat("a"), chat("xyz")],
        [chat("a"), chat(finish="stop")],
        [chat("a"), b"[DONE]"],
    ],
)
def test_another_text_is_noticed(replay):
    transcript = Transcript()
    take(transcript, [chat("ab")])
    transcript.replay()
    with pytest.raises(Diverged):
        take(transcript, replay)


def test_a_second_failover_replays_what_both_said():
    transcript = Transcript()
    assert take(transcript, [chat("a")]) == "a"
    transcript.replay()
    assert take(transcript, [chat("ab")]) == "b"
    transcript.replay()
    assert take(transcript, [chat("a"), chat("bc"), chat(finish="stop"), b"[DONE]"]) == "c"


def test_what_was_finished_does_not_finish_again():
    transcript = Transcript()
    usage = {"id": "a", "created": 1, "choices": [], "usage": {"n": 1}}
    stream = [chat("a"), chat(finish="stop"), usage]
    take(transcript, stream)
    transcript.replay()
    assert [transcript.take(encoded(chunk)) for chunk in stream] == [None, None, None]
    assert transcript.take(b"[DONE]") == b"data: [DONE]\n\n"


def test_an_error_is_the_servers():
    with pytest.raises(Failed) as caught:
        Transcript().take(b'{"error": {"message": "m", "code": "c"}}')
    assert caught.value.error["code"] == "c"


def test_without_a_failover_events_pass_as_they_are():
    raw = b'{"id":"a", "choices":[{"index":0,"text":"x","odd":1}]}'
    assert Transcript().take(raw) == b"data: " + raw + b"\n\n"


def called(number: int, name: str, arguments: str, id: str) -> dict:
    function = {"name": name, "arguments": arguments}
    call = {"index": number, "id": id, "type": "function", "function": function}
    return chat(tool_calls=[call])


def given_out(transcript: Transcript, stream: list) -> list[dict]:
    """Deltas that a client gets."""
    events = [transcript.take(encoded(chunk)) for chunk in stream]
    found = [json.loads(event.removeprefix(b"data: ")) for event in events if event is not None]
    return [choice["delta"] for chunk in found for choice in chunk["choices"]]


@pytest.mark.parametrize("lost_after", range(6))
def test_thoughts_and_calls_are_told_once_whenever_a_server_is_lost(lost_after):
    def stream(id: str) -> list[dict]:
        return [
            chat("", role="assistant"),
            chat(reasoning_content="which "),
            chat(reasoning_content="city?"),
            called(0, "weather", '{"city": "Ulm"}', f"{id}-0"),
            called(1, "time", "{}", f"{id}-1"),
            chat(finish="tool_calls"),
        ]

    transcript = Transcript()
    deltas = given_out(transcript, stream("first")[:lost_after])
    transcript.replay()
    deltas += given_out(transcript, stream("second"))
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "which city?"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["function"]["name"] for call in calls] == ["weather", "time"]
    firsts = max(0, lost_after - 3)
    assert [call["id"] for call in calls] == ["first-0", "first-1"][:firsts] + [
        "second-0",
        "second-1",
    ][firsts:]


@pytest.mark.parametrize(
    "replay",
    [
        [called(0, "weather", '{"city": "Bonn"}', "b")],
        [chat(reasoning_content="no")],
        [chat(finish="tool_calls")],
    ],
)
def test_another_call_or_thought_is_noticed(replay):
    transcript = Transcript()
    given_out(transcript, [chat(reasoning_content="yes"), called(0, "weather", "{}", "a")])
    transcript.replay()
    with pytest.raises(Diverged):
        given_out(transcript, [*replay, b"[DONE]"])


def test_tokens_that_were_told_are_known_and_only_shown_if_wanted():
    def chunk(text: str, ids: list[int], **more) -> dict:
        told = chat(text, **more)
        told["choices"][0]["token_ids"] = ids
        return told

    transcript = Transcript(shows_ids=False)
    event = transcript.take(encoded(chunk("a", [1])))
    assert event is not None
    assert b"token_ids" not in event
    assert transcript.take(encoded(chunk("", [2]))) is None  # its text is not certain yet
    assert transcript.said == [1, 2]
    transcript.replay()
    assert transcript.take(encoded(chunk("a", [1, 2]))) is None
    assert transcript.take(encoded(chunk("b", [3]))) is not None
    assert transcript.said == [1, 2, 3]
    transcript.take(encoded(chunk("", [], finish="stop")))
    assert transcript.said == [1, 2, 3]
    several = Transcript()
    for index in (0, 1):
        several.take(encoded(chunk("a", [1], index=index)))
    assert several.said == []


def test_token_ids_come_once():
    def chunk(text: str, ids: list[int]) -> dict:
        told = chat(text)
        told["choices"][0]["token_ids"] = ids
        return told

    transcript = Transcript()
    transcript.take(encoded(chunk("ab", [1, 2])))
    transcript.replay()
    event = transcript.take(encoded(chunk("abc", [1, 2, 3])))
    assert event is not None
    (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
    assert choice["token_ids"] == [3]
    assert choice["delta"] == {"content": "c"}
