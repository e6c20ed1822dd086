"""Traces as they are published and as they are recorded."""

import pytest

from quire.errors import ConfigError
from quire.replay.synthetic import Chats, chats
from quire.replay.trace import read_trace


def written(folder, *lines: str):
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def line(at_ms: int, ids: list[int], more: str = "") -> str:
    return (
        f'{{"timestamp": {at_ms}, "input_length": {512 * len(ids)}, "output_length": 7, '
        f'"hash_ids": {ids}{more}}}'
    )


def test_a_published_trace_is_read_in_the_order_of_arrival(tmp_path):
    trace = read_trace(written(tmp_path, line(2000, [0, 5]), line(500, [0, 1]), ""))
    assert [row.at_s for row in trace.rows] == [0.5, 2.0]
    assert [len(row.pages) for row in trace.rows] == [2, 2]
    assert trace.rows[0].pages[0] == trace.rows[1].pages[0]
    assert (trace.num_asked, trace.num_distinct, trace.block_tokens) == (4, 3, 512)
    assert trace.duration_s == 1.5
    assert len(read_trace(written(tmp_path, line(0, [1]), line(1, [2])), limit=1).rows) == 1


def test_a_page_is_one_and_the_same_only_after_the_same_pages(tmp_path):
    """Whatever the ids of a file promise: a block of equal tokens elsewhere is another page."""
    first, second, third = read_trace(
        written(tmp_path, line(0, [1, 9]), line(1, [2, 9]), line(2, [9]))
    ).rows
    assert len({first.pages[1], second.pages[1], third.pages[0]}) == 3


def test_what_answers_fill_comes_after_the_prompt(tmp_path):
    heading = '{"quire_trace": 1, "block_tokens": 128, "bytes_per_token": 1000}'
    rows = (line(0, [1], ', "answer_ids": [2, 3]'), line(1, [1, 2, 3, 4]))
    trace = read_trace(written(tmp_path, heading, *rows))
    assert (trace.block_tokens, trace.bytes_per_token) == (128, 1000)
    assert trace.rows[1].pages[:3] == [*trace.rows[0].pages, *trace.rows[0].answer_pages]
    assert trace.largest == 4


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([line(0, [1]), "{"], "line 2 of"),
        (['{"timestamp": 0}'], "line 1 of"),
        ([line(-1, [1])], "negative"),
        (["[]"], "hash_ids"),
        (["\x00"], "line 1 of"),
        ([], "nothing to replay"),
        ([line(0, [])], "nothing to replay"),
        (['{"quire_trace": 2, "block_tokens": 1}', line(0, [1])], "another version"),
    ],
)
def test_what_is_no_trace_is_one_sentence(tmp_path, lines, wanted):
    with pytest.raises(ConfigError, match=wanted):
        read_trace(written(tmp_path, *lines))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_chats_share_the_system_prompts_of_their_groups():
    options = Chats(groups=3, requests=300, active=20, system_blocks=4)
    trace = chats(options)
    assert trace.rows == chats(options).rows
    assert len({row.pages[0] for row in trace.rows}) == 3
    assert len({tuple(row.pages[:4]) for row in trace.rows}) == 3
    assert len({tuple(row.pages) for row in trace.rows}) == 300
