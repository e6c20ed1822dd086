"""`vllm serve` with Quire, as processes: the tokens of vLLM alone from the host, for many at once
and for two tenants, and what vLLM's subscribers hear of it; killed while it saves, and what its
next lives find in the store: in chunks where memory is tiny, and where the store is faulty.
"""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ports import free_port
from vllm_engines import LONG, MANY, PAGE, Subject, prompt, vllm_environment, whole_pages
from vllm_subscribers import subscribed

START_S = 600
FAULTS = "drop=0.1&truncate=0.1&corrupt=0.1&raise=0.2&delay=0.2&delay_s=0.05&seed=1"


@contextmanager
def served(model: str, store: str, log: Path, *more: str) -> Iterator[str]:
    """Its address. Ended by SIGKILL, with all its processes."""
    port = free_port()
    python = Path(os.environ["QUIRE_VLLM_PYTHON"])
    transfer = {
        "kv_connector": "QuireConnector",
        "kv_connector_module_path": "quire.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_memory": "256MiB",
            "wait_s": 120,
            "store": store,
        },
    }
    command = [python.parent / "vllm", "serve", model, "--served-model-name", "m"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "1024"]
    command += ["--block-size", str(PAGE), "--enforce-eager", "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer), *more]
    environment = vllm_environment(
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PORT=str(free_port()),  # where it begins to look for ports of its own
        VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES="0",
        VLLM_SERVER_DEV_MODE="1",  # its prefix cache can be reset
    )
    with log.open("ab") as lines:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            stdout=lines,
            stderr=lines,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_S
        while not is_up(address):
            assert process.poll() is None, log.read_text()[-20_000:]
            assert time.monotonic() < until, log.read_text()[-20_000:]
            time.sleep(1)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(address: str, path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        read: bytes = answer.read()
    return read


def ask(address: str, tokens: list[int], **more: Any) -> tuple[list[int], int]:
    """The greedy answer, and the tokens that were not computed."""
    body = {"model": "m", "prompt": tokens, "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **more}
    told = json.loads(post(address, "/v1/completions", body))
    details = told["usage"].get("prompt_tokens_details") or {}
    return told["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def ask_all(address: str, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = threads.map(lambda one: ask(address, one, **more), prompts)
        return [tokens for tokens, _ in found]


def num_files(store: Path) -> int:
    return sum(path.is_file() for path in store.rglob("*"))


def metrics_of(address: str) -> str:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        read: str = answer.read().decode()
    return read


def counted(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


GROWING = [prompt(number, 300) for number in range(100, 106)]
"""Together they have room when they begin to answer, and have not when they end, in 48 blocks."""
LONGER = 96

BOTH = pytest.mark.parametrize(
    "subject", ["small", pytest.param("windows", marks=pytest.mark.long)], indirect=True
)


@BOTH
def test_what_one_life_saved_the_next_one_finds_although_it_was_killed(
    subject: Subject, tmp_path: Path
) -> None:
    folder, log = tmp_path / "store", tmp_path / "log"
    folder.mkdir()
    store = f"file://{folder}?max=2GiB"
    last = prompt(77, 400)
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    publish = {"enable_kv_cache_events": True, "publisher": "zmq"}
    publish |= {"endpoint": events.replace("127.0.0.1", "*"), "replay_endpoint": replay}
    with served(subject.model, store, log, "--kv-events-config", json.dumps(publish)) as address:
        assert ask(address, LONG) == (subject.long[0], 0)
        assert ask_all(address, MANY) == subject.many
        grown = ask_all(address, GROWING, max_tokens=LONGER)
        assert ask(address, LONG, cache_salt="a") == (subject.long[0], 0), "tenants share nothing"
        until = time.monotonic() + 120
        while num_files(folder) < len(LONG) // PAGE and time.monotonic() < until:
            time.sleep(0.1)
        with subscribed(events, replay) as subscriber:
            hears_what_is_there(subscriber.held())
        post(address, "/reset_prefix_cache", {})
        assert ask(address, LONG) == (subject.long[0], whole_pages(LONG)), "from the host"
        unsaved = ask(address, last)
    tiny = ("--max-num-batched-tokens", "96", "--num-gpu-blocks-override", "48")
    with served(subject.model, store, log, *tiny) as address:
        assert ask(address, LONG) == (subject.long[0], whole_pages(LONG)), "from the store"
        assert ask_all(address, MANY) == subject.many
        assert ask_all(address, GROWING, max_tokens=LONGER) == grown
        assert ask(address, last)[0] == unsaved[0]
        metrics = metrics_of(address)
    assert counted(metrics, "vllm:num_preemptions_total") > 0, "this should have been too small"
    assert "vllm:prompt_tokens_cached_by_source_total{" in metrics
    assert 'source="disk"' in metrics
    assert "quire_cache_total" in metrics


def hears_what_is_there(told: dict[str, Any]) -> None:
    """Page by page: the host has all of the long prompt, the store has begun to."""
    known = {
        medium: {tuple(told["tokens"][name]) for name in names}
        for medium, names in told["held"].items()
    }
    pages = {tuple(LONG[:end]) for end in range(PAGE, len(LONG) + 1, PAGE)}
    assert pages <= known["CPU"]
    assert pages & known["STORAGE"]
    assert known["STORAGE"] <= known["CPU"], "nothing was evicted"


@pytest.mark.long
def test_a_faulty_store(subject: Subject, tmp_path: Path) -> None:
    folder, log = tmp_path / "store", tmp_path / "log"
    folder.mkdir()
    for _ in range(2):
        with served(subject.model, f"faulty+file://{folder}?{FAULTS}", log) as address:
            assert ask(address, LONG)[0] == subject.long[0]
            assert ask_all(address, MANY) == subject.many
            post(address, "/reset_prefix_cache", {})
            assert ask(address, LONG)[0] == subject.long[0]
