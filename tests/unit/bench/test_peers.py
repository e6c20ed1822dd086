"""`quire bench peers` around engines that only pretend."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench.peers import report, rest
from quire.bench.peers.lmcache import LmcacheServer
from quire.bench.peers.rest import wait_for_rest
from quire.bench.peers.run import ALONE, LMCACHE, QUIRE, PeersPlan, run
from quire.bench.peers.sessions import read_sessions
from quire.errors import ConfigError
from unit.bench.alive import is_alive, until

ENGINE = f"""#!{sys.executable}
import json, sys
quire = json.loads(sys.stdin.readline())["transfer"] is not None
print("{{}}", flush=True)
known = set()
for line in sys.stdin:
    order = json.loads(line)
    prompts = order.get("prompts", [])
    hits = [len(p) - 1 if quire and str(p) in known else 0 for p in prompts]
    known.update(map(str, prompts))
    seconds = 1.0 - 0.5 * any(hits)
    tokens = [[sum(p) % 7 + (WRONG and quire)] for p in prompts]
    found = dict(seconds=seconds, tokens=tokens, reused=hits, max_rss_bytes=1)
    print(json.dumps(found), flush=True)
"""

SERVER = f"""#!{sys.executable}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port = int(sys.argv[sys.argv.index("--http-port") + 1])
HTTPServer(("localhost", port), BaseHTTPRequestHandler).serve_forever()
"""


def engine(folder: Path, *, wrong: bool = False) -> Path:
    """With an LMCache that pretends beside it."""
    texts = {"python": ENGINE.replace("WRONG", str(wrong)), "lmcache": SERVER}
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder / "python"


def test_hits_are_paired_with_what_the_other_side_needed(tmp_path: Path) -> None:
    done: list[int] = []
    plan = PeersPlan(engine(tmp_path), tmp_path, lengths=(8,), rounds=2)
    result = run(plan, lambda _what, at, _of: done.append(at))
    cases = {case["what"]: case for case in result["cases"]}
    assert cases["again"]["ratio"][ALONE]["ratio"] == 0.5
    assert cases["again"]["ratio"][LMCACHE]["ratio"] == 1
    assert cases["new"]["ratio"][ALONE]["ratio"] == cases["batch"]["ratio"][ALONE]["ratio"] == 1
    assert cases["again"]["reused"] == {ALONE: 0, QUIRE: 14, LMCACHE: 14}
    assert len(cases["restart"]["samples"][QUIRE]) == 2, "what was asked before is asked again"
    assert result["max_rss_bytes"][LMCACHE] > result["max_rss_bytes"][QUIRE], "its server counts"
    assert result["same_tokens"]
    assert done[-1] == 3
    assert report.tables(result)
    report.plot(result, tmp_path / "plots")
    assert (tmp_path / "plots/peers.png").stat().st_size > 0


def test_turns_of_sessions_are_grouped_by_what_was_there_before(tmp_path: Path) -> None:
    session = [list(range(length)) for length in (100, 1100, 1200, 2100, 2200)]
    plan = PeersPlan(engine(tmp_path), tmp_path, (8,), 1, (session,), lmcache=False)
    result = run(plan, lambda *_: None)
    counts = {
        case["tokens"]: len(case["samples"][QUIRE])
        for case in result["cases"]
        if case["what"] == "turn"
    }
    assert counts == {0: 1, 1024: 2, 2048: 1}
    assert report.tables(result)


class Words:
    """A tokenizer: a word is a token, its number how long it is."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def test_sessions_grow_turn_by_turn_and_no_two_begin_alike(tmp_path: Path) -> None:
    def rows(name: str, *found: dict[str, object]) -> None:
        (tmp_path / name).write_text("\n".join(map(json.dumps, found)))

    grown = [{"input": "a bb"}, {"input": "a bb ccc"}, {"input": "a bb ccc d d d d d"}]
    rows("1.jsonl", *grown)
    rows("2.jsonl", *grown[:2])
    rows("3.jsonl", {"turns": ["eeee", "a"]}, {"turns": ["alone"]})
    found = read_sessions([tmp_path], Words(), count=9, turns=9, max_tokens=5)
    assert found == [[[1, 2], [1, 2, 3]], [[4], [4, 1]]]
    with pytest.raises(ConfigError, match="two turns within 2 tokens"):
        read_sessions([tmp_path / "1.jsonl"], Words(), count=9, turns=9, max_tokens=2)


def test_lmcaches_server_does_not_outlive_the_benchmark_however_that_ends(tmp_path: Path) -> None:
    bench = (
        "import sys\n"
        "from pathlib import Path\n"
        "from quire.bench.peers.lmcache import LmcacheServer\n"
        f"folder = Path({str(engine(tmp_path).parent)!r})\n"
        "server = LmcacheServer(folder / 'python', 1, folder / 'log')\n"
        "server.ready()\n"
        "print(server.process_id, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", bench], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    until(lambda: not is_alive(pid))


def test_an_lmcache_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lmcache cannot be run: No such file"):
        LmcacheServer(tmp_path / "python", 1, tmp_path / "log")


BUSY = """
import sys, time
print("begun", flush=True)
while time.process_time() < 0.2:
    pass
open(sys.argv[1], "w").close()
sys.stdin.read()
"""


def test_nobody_is_asked_beside_what_another_has_left_to_do(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, str(done)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert wait_for_rest([process.pid])
        assert done.exists()
        process.kill()
    assert wait_for_rest([process.pid])  # nobody is there any more


def test_who_waits_for_the_processor_all_the_time_does_not_rest(monkeypatch) -> None:
    monkeypatch.setattr(rest, "LONGEST_S", 1.0)
    core = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", busy]
    with contextlib.ExitStack() as stack:
        there = []
        for nice in (["nice", "-n", "14"], [], [], []):
            process = subprocess.Popen([*nice, *command], stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            there.append(process)
        assert not wait_for_rest([there[0].pid])


def test_other_tokens_are_seen(tmp_path: Path) -> None:
    plan = PeersPlan(engine(tmp_path, wrong=True), tmp_path, lengths=(8,), rounds=1, lmcache=False)
    assert not run(plan, lambda *_: None)["same_tokens"]


def test_an_environment_without_vllm_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be run"):
        run(PeersPlan(tmp_path / "none", tmp_path, lmcache=False), lambda *_: None)
    ends = tmp_path / "ends"
    ends.write_text(f"#!{sys.executable}\nimport sys; sys.stdin.readline()\n")
    ends.chmod(0o755)
    with pytest.raises(ConfigError, match="vLLM and Quire in one environment"):
        run(PeersPlan(ends, tmp_path, lmcache=False), lambda *_: None)
