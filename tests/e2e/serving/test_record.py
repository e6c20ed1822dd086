"""A real server that records what it is asked, and the trace replayed."""

from pathlib import Path

from e2e.disagg.servers import Node
from e2e.exactness.subjects import TINY_LLAMA
from quire.replay.run import ReplayOptions, replay
from quire.replay.trace import read_trace


def test_what_a_server_found_is_what_its_recording_finds(tmp_path: Path) -> None:
    prompts = [TINY_LLAMA.cut(11, 400), TINY_LLAMA.cut(30, 300)]
    with Node(tmp_path / "n", TINY_LLAMA, record=tmp_path / "t.jsonl") as node:
        replies = [node.ask(prompt, 4) for prompt in (*prompts, prompts[0])]
        node.press_ctrl_c()
        assert node.wait() == 0
    cached = [reply.usage["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    trace = read_trace(tmp_path / "t.jsonl")
    assert [row.num_tokens for row in trace.rows] == [
        len(prompt) for prompt in (*prompts, prompts[0])
    ]
    found = replay(trace, ReplayOptions(device_pages=50, host_pages=50)).found
    blocks = [each.num_pages * trace.block_tokens for each in found]
    assert blocks[:2] == [0, 0]
    assert blocks[2] == 3 * trace.block_tokens <= cached[2]
