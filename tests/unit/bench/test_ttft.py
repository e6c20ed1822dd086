"""The parts of `quire bench ttft`: the order of things, and what it finds wrong."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from quire.bench.ttft import hits as ttft_hits
from quire.bench.ttft import overhead as ttft_overhead
from quire.bench.ttft import report as ttft_report
from quire.bench.ttft.adminclient import AdminClient
from quire.bench.ttft.overhead import WITH, WITHOUT, ServerSide
from quire.bench.ttft.prompts import Prompts
from quire.bench.ttft.run import started
from quire.errors import EngineError, ModelError
from unit.bench.fake_server import Fake, serving
from unit.bench.shown import shown

PROMPTS = [f"{i} {'to be or not to be ' * 60}" for i in range(3)]


def text_of(result) -> str:
    return shown(ttft_report.tables(result))


def whole(**parts):
    about = {"model": "m", "device": "cpu", "device_bytes": 1 << 30, "host_bytes": 1 << 31}
    return {**about, **parts}


def hits(url: str):
    async def measure():
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            admin = AdminClient(client, "key")
            return await ttft_hits.measure(client, admin, "fake", PROMPTS, lambda done: None)

    return asyncio.run(measure())


def test_each_prompt_is_computed_then_found_in_every_tier(fake, url):
    result = hits(url)
    assert result["ok"]
    assert [sample["case"] for sample in result["samples"]] == ["cold", "L1", "L2", "L3"] * 3
    assert fake.flushes == [["device"], ["device", "host"]] * 3
    assert [request["prompt"] for request in fake.requests] == [
        p for p in PROMPTS for _ in range(4)
    ]
    assert fake.busy_polls == 0
    assert "Bearer key" in fake.keys
    shown = text_of(whole(hits=result))
    assert "computed" in shown
    assert "3 of 3" in shown


def test_a_hit_in_the_wrong_tier_is_found(fake, url):
    fake.flush = lambda tiers: None
    result = hits(url)
    assert not result["ok"]
    assert [case["as_meant"] for case in result["cases"].values()] == [3, 3, 0, 0]
    assert "0 of 3" in text_of(whole(hits=result))


def test_another_answer_is_found(fake, url):
    def forgetful(body):
        pieces = fake.answer(body)
        return pieces if len(fake.requests) % 4 else [pieces[0].replace(b"w", b"v"), *pieces[1:]]

    fake.stream = forgetful
    result = hits(url)
    assert not result["ok"]
    assert [case["same_answer"] for case in result["cases"].values()] == [3, 3, 3, 0]


def test_a_request_that_fails_ends_the_run(fake, url):
    fake.status_code = 500
    with pytest.raises(EngineError, match="500 too busy"):
        hits(url)


def test_speedups_are_those_of_the_medians():
    cases = {"cold": [10.0, 12.0, 11.0], "L1": [0.1, 0.2, 0.1], "L2": [0.5] * 3, "L3": [1.0] * 3}
    samples = [
        {"case": name, "ttft_s": times[i], "prompt_tokens": 4000}
        | {"is_as_meant": True, "is_same_answer": True}
        for i in range(3)
        for name, times in cases.items()
    ]
    result = ttft_hits.summed_up(samples)
    assert [case["speedup"] for case in result["cases"].values()] == pytest.approx([1, 110, 22, 11])
    assert result["cases"]["L1"]["speedup_min"] == pytest.approx(60)
    assert result["slowest_hit_speedup"] == pytest.approx(11)
    shown = text_of(whole(hits=result))
    assert "The slowest hit is 11.0 times faster" in shown
    assert "110.0" in shown


# ---- cost when nothing is reused -----------------------------------------------------------------


def overhead(on: Fake, off: Fake, prompts=PROMPTS):
    async def measure(urls):
        async with (
            httpx.AsyncClient(base_url=urls[0], verify=False) as first,
            httpx.AsyncClient(base_url=urls[1], verify=False) as second,
        ):
            sides = (
                ServerSide(WITH, first, AdminClient(first, "k"), "fake", os.getpid()),
                ServerSide(WITHOUT, second, AdminClient(second, "k"), "fake", os.getpid()),
            )
            return await ttft_overhead.measure(sides, prompts, 4, lambda done: None)

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
    assert "text" not in result["samples"][0][WITH]
    shown = text_of(whole(overhead={"prompt_tokens": 9, "output_tokens": 4, **result}))
    assert "Nothing reused: 2 unique prompts" in shown
    assert "the lower tiers cost" in shown


def test_prompts_that_are_reused_after_all_are_found():
    result = overhead(Fake(), Fake(), [PROMPTS[0], PROMPTS[0]])
    assert not result["ok"]
    assert result["reused_tokens"] > 0


def test_the_ratio_is_of_the_measured_times():
    def one(seconds):
        common = {"ttft_s": seconds / 2, "cpu_s": seconds, "settled_s": 0.01, "cached_tokens": 0}
        return {"total_s": seconds, "text": "t", **common}

    rounds = [{WITH: one(1.05 * s), WITHOUT: one(s)} for s in (1.0, 1.1, 1.3, 0.9)]
    result = ttft_overhead.summed_up(rounds)
    assert result["total_s"]["ratio"]["of_medians"]["ratio"] == pytest.approx(1.05)
    shown = text_of(whole(overhead={"prompt_tokens": 9, "output_tokens": 4, **result}))
    assert "+5.0 %" in shown


def test_cpu_time_of_a_session_counts_its_children():
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", busy], start_new_session=True)
    try:
        while ttft_overhead.cpu_seconds(process.pid) < 0.2:
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, 9)
        process.wait()


# ---- prompts, admin, processes -------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["to be or not to be that is the question"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_prompts_have_the_length_asked_for(model):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = Prompts(model, seed=1)
    for length in (100, 400):
        found = len(tokenizer.encode(prompts.next(length)).ids)
        assert abs(found - length) <= 2
    assert prompts.next(100)[:8] != prompts.next(100)[:8]


def test_a_model_without_a_tokenizer_is_one_sentence(tmp_path):
    with pytest.raises(ModelError, match="save the model with a fast tokenizer"):
        Prompts(tmp_path, seed=1)


def test_waiting_for_writes_ends(fake, url):
    async def wait(timeout_s):
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            await AdminClient(client, "k").wait_idle(timeout_s)

    fake.busy_polls = 4
    asyncio.run(wait(10.0))
    assert fake.busy_polls == 0
    fake.busy_polls = 10**6
    with pytest.raises(EngineError, match="still moves pages"):
        asyncio.run(wait(0.01))


def test_a_server_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setenv("QUIRE_PORT", "not a port: must not reach the server")

    async def start():
        arguments = ["--host-memory", "0", "--store", "file:///x"]
        async with started("tiers on", arguments, admin_key="k"):
            raise AssertionError("it started")

    with pytest.raises(EngineError) as caught:
        asyncio.run(start())
    assert "the tiers on server ended with code 2" in str(caught.value)
    assert "give host_memory a size, or set store to none" in str(caught.value)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_its_servers_do_not_outlive_it_however_it_ends(tmp_path):
    child = (
        "import os, pathlib, time\n"
        "from quire.own_server import end_with_standard_input\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "end_with_standard_input()\n"
        "time.sleep(60)\n"
    )
    bench = (
        "import asyncio, sys\n"
        "from quire.bench.ttft import run\n"
        f"run.COMMAND = (sys.executable, '-c', {child!r})\n"
        "asyncio.run(run.started('tiers on', [], admin_key='k').__aenter__())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", bench])
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    process.kill()
    process.wait()
    until(lambda: not is_alive(pid))
