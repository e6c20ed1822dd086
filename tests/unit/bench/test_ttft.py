"""The parts of `quire bench ttft`: the order of things, and what it finds wrong."""

import asyncio
import subprocess
import sys

import httpx
import pytest

from quire.bench.prose import Prose
from quire.bench.ttft import report as ttft_report
from quire.bench.ttft import run as ttft_run
from quire.bench.ttft.warm_server import WarmServer, started, warmed_up
from quire.errors import EngineError
from unit.bench.alive import is_alive, until
from unit.bench.shown import shown

PROMPTS = [f"{i} {'to be or not to be ' * 60}" for i in range(3)]


def text_of(result) -> str:
    return shown(ttft_report.tables(result))


def whole(hits):
    about = {"model": "m", "device": "cpu", "device_bytes": 1 << 30, "host_bytes": 1 << 31}
    return {**about, "hits": hits}


def hits(url: str):
    async def measure():
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            server = WarmServer(client, "key", "fake", 0)
            return await ttft_run.measure(server, PROMPTS, lambda done: None)

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
    shown = text_of(whole(result))
    assert "computed" in shown
    assert "3 of 3" in shown


def test_a_hit_in_the_wrong_tier_is_found(fake, url):
    fake.flush = lambda tiers: None
    result = hits(url)
    assert not result["ok"]
    assert [case["as_meant"] for case in result["cases"].values()] == [3, 3, 0, 0]
    assert "0 of 3" in text_of(whole(result))


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
    result = ttft_run.summed_up(samples)
    assert [case["speedup"] for case in result["cases"].values()] == pytest.approx([1, 110, 22, 11])
    assert result["cases"]["L1"]["speedup_min"] == pytest.approx(60)
    assert result["slowest_hit_speedup"] == pytest.approx(11)
    shown = text_of(whole(result))
    assert "The slowest hit is 11.0 times faster" in shown
    assert "110.0" in shown


# ---- its server ----------------------------------------------------------------------------------


def test_prompts_have_about_the_length_asked_for(url):
    prose = Prose(seed=1)

    async def asked(num_tokens):
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            cold = WarmServer(client, "k", "fake", 0, chars_per_token=9.0)
            server = await warmed_up(cold, prose)
            prompts = server.prompts(prose, 3, num_tokens)
            return prompts, [await server.ask(prompt, 2) for prompt in prompts]

    for num_tokens in (100, 400):
        prompts, answers = asyncio.run(asked(num_tokens))
        assert [abs(each.prompt_tokens - num_tokens) <= 2 for each in answers] == [True] * 3
        assert len({prompt[:8] for prompt in prompts}) == 3


def test_a_server_that_is_not_ours_is_one_sentence(fake, url):
    fake.tells_tiers = False

    async def warm_up():
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            await warmed_up(WarmServer(client, "k", "fake", 0), Prose(seed=1))

    with pytest.raises(EngineError, match="is it a Quire server"):
        asyncio.run(warm_up())


def test_waiting_for_writes_ends(fake, url):
    async def wait(timeout_s):
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            await WarmServer(client, "k", "fake", 0).wait_idle(timeout_s)

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
        async with started("tiers on", arguments, Prose(1)):
            raise AssertionError("it started")

    with pytest.raises(EngineError) as caught:
        asyncio.run(start())
    assert "the tiers on server ended with code 2" in str(caught.value)
    assert "give host_memory a size, or set store to none" in str(caught.value)


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
        "from quire.bench.prose import Prose\n"
        "from quire.bench.ttft import warm_server\n"
        f"warm_server.COMMAND = (sys.executable, '-c', {child!r})\n"
        "asyncio.run(warm_server.started('tiers on', [], Prose(1)).__aenter__())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", bench])
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    process.kill()
    process.wait()
    until(lambda: not is_alive(pid))
