"""`quire serve --record`: what is in the file, what is not, and how it ends."""

import json
import stat

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.replay.trace import read_trace
from quire.server.recorder import Asked, Recorder
from unit.server.scripted import Rig, ScriptedEngine

PAGE, BLOCK = 16, 128


def recorder(file, **options) -> Recorder:
    given = {"page_size": PAGE, "bytes_per_token": 1000, "max_bytes": 1 << 20, "now_s": 5.0}
    return Recorder(file, **given | options)


def tokens(count: int, start: int = 0) -> bytes:
    return np.arange(start, start + count, dtype="<i4").tobytes()


def recorded(file, *asked: Asked, **options):
    recording = recorder(file, **options)
    for each in asked:
        recording.take(each)
    recording.close()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_recording_is_a_trace(tmp_path):
    file = tmp_path / "t.jsonl"
    heading, first, second = recorded(
        file,
        Asked(6.0, tokens(300), "", list(range(300, 400))),
        Asked(7.5, tokens(600), "", []),
    )
    assert heading == {"quire_trace": 1, "block_tokens": BLOCK, "bytes_per_token": 1000}
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (1000, 300, 100)
    assert (len(first["hash_ids"]), len(first["answer_ids"])) == (2, 1)
    assert second["hash_ids"][:3] == [*first["hash_ids"], *first["answer_ids"]]
    trace = read_trace(file)
    assert (len(trace.rows), trace.num_asked, trace.num_distinct) == (2, 6, 4)


def test_digests_are_of_this_file_this_salt_and_all_that_is_before(tmp_path):
    prompt = tokens(2 * BLOCK)
    other = tokens(BLOCK, 7) + prompt[BLOCK * 4 :]
    _, plain, salted, shifted = recorded(
        tmp_path / "a", *(Asked(5, t, s, []) for t, s in ((prompt, ""), (prompt, "x"), (other, "")))
    )
    _, elsewhere = recorded(tmp_path / "b", Asked(5, prompt, "", []))
    ids = [each["hash_ids"] for each in (plain, salted, shifted, elsewhere)]
    assert len({number for each in ids for number in each}) == 8


def test_no_token_is_in_it_and_nobody_else_can_read_it(tmp_path):
    file = tmp_path / "t"
    secret = [1234567, 7654321] * BLOCK
    recorded(file, Asked(5, np.array(secret, "<i4").tobytes(), "salty", secret))
    text = file.read_text()
    assert not any(word in text for word in ("1234567", "7654321", "salty"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_it_ends_when_the_file_is_full_and_every_line_in_it_is_whole(tmp_path):
    file = tmp_path / "t"
    lines = recorded(
        file, *(Asked(5.0 + i, tokens(BLOCK * 10, i), "", []) for i in range(50)), max_bytes=2000
    )
    assert 2 <= len(lines) < 50
    assert file.stat().st_size <= 2000


def test_blocks_are_whole_pages(tmp_path):
    heading, *_ = recorded(tmp_path / "t", page_size=48)
    assert heading["block_tokens"] == 144


def test_a_file_that_is_there_is_not_touched(tmp_path):
    (tmp_path / "t").write_text("mine")
    with pytest.raises(ConfigError, match="name a new file"):
        recorder(tmp_path / "t")
    assert (tmp_path / "t").read_text() == "mine"


def test_more_than_can_be_written_is_dropped_and_nobody_waits(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.server.recorder._MAX_QUEUED_BYTES", 20_000)
    recording = recorder(tmp_path / "t")
    for _ in range(1000):
        recording.take(Asked(5, tokens(BLOCK * 20), "", []))
    recording.close()
    lines = (tmp_path / "t").read_text().splitlines()
    assert len(lines) - 1 + recording.num_dropped == 1000
    recording = recorder(tmp_path / "u")
    recording.take(Asked(5, tokens(5000), "", []))  # more than may ever wait
    recording.close()
    assert recording.num_dropped == 1


def test_the_server_records_every_choice_with_what_was_said(tmp_path):
    rig = Rig(ScriptedEngine("x" * 40))
    rig.service.recorder = recorder(tmp_path / "t", now_s=rig.service.clock())
    assert rig.complete("y" * 120, n=2, max_tokens=20, cache_salt="s").status_code == 200
    assert rig.chat("hi", stream=True).status_code == 200
    rig.service.recorder.close()
    _, *lines = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert [line["input_length"] for line in lines[:2]] == [120, 120]
    assert [line["output_length"] for line in lines[:2]] == [20, 20]
    assert len(lines[0]["answer_ids"]) == 1
    assert lines[0]["answer_ids"] == lines[1]["answer_ids"]
    assert len(lines) == 3
