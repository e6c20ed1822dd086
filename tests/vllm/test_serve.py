"""`vllm serve` with Quire, as processes: killed while it saves, and what its next life finds."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.models import embedded_model

START_S = 600
PAGE = 32


@contextmanager
def served(store: Path, log: Path) -> Iterator[str]:
    """Its address. Ended by SIGKILL, with all its processes."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    python = Path(os.environ["QUIRE_VLLM_PYTHON"])
    transfer = {
        "kv_connector": "QuireConnector",
        "kv_connector_module_path": "quire.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_memory": "256MiB",
            "store": f"file://{store}?max=2GiB",
        },
    }
    command = [python.parent / "vllm", "serve", embedded_model(), "--served-model-name", "m"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "1024"]
    command += ["--block-size", str(PAGE), "--enforce-eager", "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("PYTHONPATH", None)
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
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
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


def ask(address: str, prompt: list[int]) -> tuple[str, int]:
    """The greedy answer, and the tokens that were not computed."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        told: dict[str, Any] = json.load(answer)
    details = told["usage"].get("prompt_tokens_details") or {}
    return told["choices"][0]["text"], details.get("cached_tokens") or 0


def num_files(store: Path) -> int:
    return sum(path.is_file() for path in store.rglob("*"))


def test_what_one_life_saved_the_next_one_finds_although_it_was_killed(tmp_path: Path) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    store.mkdir()
    prompts = [[(7 * at + 1000 * turn) % 30000 + 500 for at in range(400)] for turn in (1, 2)]
    with served(store, log) as address:
        first = ask(address, prompts[0])
        until = time.monotonic() + 60
        while num_files(store) < 400 // PAGE and time.monotonic() < until:
            time.sleep(0.1)
        second = ask(address, prompts[1])
    assert first[1] == second[1] == 0
    with served(store, log) as address:
        again = [ask(address, prompt) for prompt in prompts]
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
    assert [text for text, _ in again] == [first[0], second[0]]
    assert again[0][1] == 399 // PAGE * PAGE
    assert "vllm:external_prefix_cache_hits" in metrics
    assert "quire_cache_total" in metrics
