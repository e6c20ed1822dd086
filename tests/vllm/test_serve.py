"""`vllm serve` with Quire, as processes: the tokens of vLLM alone from the host, for many at once
and for two tenants; killed while it saves, and what its next life finds in the store, in chunks.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_engines import LONG, MANY, PAGE, Subject, prompt, whole_pages

START_S = 600


@contextmanager
def served(model: str, store: Path, log: Path, *more: str) -> Iterator[str]:
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
            "wait_s": 120,
            "store": f"file://{store}?max=2GiB",
        },
    }
    command = [python.parent / "vllm", "serve", model, "--served-model-name", "m"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "1024"]
    command += ["--block-size", str(PAGE), "--enforce-eager", "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer), *more]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # its prefix cache can be reset
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


def ask_all(address: str, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        return [tokens for tokens, _ in threads.map(lambda one: ask(address, one), prompts)]


def num_files(store: Path) -> int:
    return sum(path.is_file() for path in store.rglob("*"))


def test_what_one_life_saved_the_next_one_finds_although_it_was_killed(
    small: Subject, tmp_path: Path
) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    store.mkdir()
    last = prompt(77, 400)
    with served(small.model, store, log) as address:
        assert ask(address, LONG) == (small.long[0], 0)
        assert ask_all(address, MANY) == small.many
        assert ask(address, LONG, cache_salt="a") == (small.long[0], 0), "tenants share nothing"
        until = time.monotonic() + 120
        while num_files(store) < len(LONG) // PAGE and time.monotonic() < until:
            time.sleep(0.1)
        post(address, "/reset_prefix_cache", {})
        assert ask(address, LONG) == (small.long[0], whole_pages(LONG)), "from the host"
        unsaved = ask(address, last)
    chunks = ("--max-num-batched-tokens", "96", "--max-num-seqs", "16")
    with served(small.model, store, log, *chunks) as address:
        assert ask(address, LONG) == (small.long[0], whole_pages(LONG)), "from the store"
        assert ask_all(address, MANY) == small.many
        assert ask(address, last)[0] == unsaved[0]
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
    assert "vllm:prompt_tokens_cached_by_source_total{" in metrics
    assert 'source="disk"' in metrics
    assert "quire_cache_total" in metrics
