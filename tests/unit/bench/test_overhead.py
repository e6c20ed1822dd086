"""The parts of `quire bench overhead`: the order of things, and what it finds wrong."""

import asyncio
import os
import subprocess
import sys
import time

import httpx
import pytest

from evidence.cost import summed_up
from evidence.overhead import report as overhead_report
from evidence.overhead import run as bench
from evidence.overhead.run import WITH, WITHOUT
from quire.bench.ttft.warm_server import WarmServer
from unit.bench.fake_server import Fake, serving
from unit.bench.shown import shown

PROMPTS = [f"{i} {'to be or not to be ' * 60}" for i in range(3)]


def text_of(result) -> str:
    about = {"model": "m", "device": "cpu", "device_bytes": 1 << 30, "host_bytes": 1 << 31}
    cost = {"prompt_tokens": 9, "output_tokens": 4, **result}
    return shown(overhead_report.tables({**about, "overhead": cost}))


def overhead(on: Fake, off: Fake, prompts=PROMPTS):
    async def measure(urls):
        async with (
            httpx.AsyncClient(base_url=urls[0], verify=False) as first,
            httpx.AsyncClient(base_url=urls[1], verify=False) as second,
        ):
            sides = {
                WITH: WarmServer(first, "k", "fake", os.getpid()),
                WITHOUT: WarmServer(second, "k", "fake", os.getpid()),
            }
            return await bench.measure(sides, prompts, 4, lambda done: None)

    with serving(on) as one, serving(off) as other:
        return asyncio.run(measure((one, other)))


def test_both_servers_get_the_same_prompts_and_take_turns_at_going_first():
    on, off = Fake(), Fake()
    result = overhead(on, off)
    assert result["ok"]
    assert [request["prompt"] for request in on.requests] == PROMPTS
    assert [request["prompt"] for request in off.requests] == PROMPTS
    assert [one["first"] for one in result["samples"]] == [WITHOUT, WITH]  # the first is dropped
    assert (result["rounds"], result["same_answer"], result["reused_tokens"]) == (2, 2, 0)
    assert "answer" not in result["samples"][0][WITH]
    shown = text_of(result)
    assert "Nothing reused: 2 unique prompts" in shown
    assert "the lower tiers cost" in shown


def test_prompts_that_are_reused_after_all_are_found():
    result = overhead(Fake(), Fake(), [PROMPTS[0], PROMPTS[0]])
    assert not result["ok"]
    assert result["reused_tokens"] > 0


def test_the_ratio_is_of_the_measured_times():
    def one(seconds):
        common = {"ttft_s": seconds / 2, "cpu_s": seconds, "settled_s": 0.01, "cached_tokens": 0}
        return {"total_s": seconds, "answer": "t", **common}

    rounds = [{WITH: one(1.05 * s), WITHOUT: one(s)} for s in (1.0, 1.1, 1.3, 0.9)]
    rounds = [{"first": WITH, **each} for each in rounds]
    result = summed_up(rounds, WITH, WITHOUT) | {"settled_s": {"p50": 0.01}}
    assert result["total_s"]["ratio"]["of_medians"]["ratio"] == pytest.approx(1.05)
    shown = text_of(result)
    assert "+5.0 %" in shown


def test_cpu_time_of_a_session_counts_its_children():
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", busy], start_new_session=True)
    try:
        while bench.cpu_seconds(process.pid) < 0.2:
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
