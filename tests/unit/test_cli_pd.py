"""`quire route` and `quire pd`: what is started, what a person sees, and that all of it ends.

The servers that `quire pd` starts are fakes here, in real processes; e2e has real ones.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.cli.pd import plan
from quire.errors import EngineError, MemoryBudgetError
from quire.own_server import Child
from quire.settings import OPTIONS, Machine, Settings, effective
from unit.cli_support import command

TESTS = Path(__file__).parents[1]
FAKE = TESTS / "unit" / "router" / "fake_child.py"
GIB = 1 << 30
LAPTOP = Machine(16 * GIB, Path("/home/ada/.cache/quire"), 100 * GIB)
PROGRAM = """
import sys
from quire import own_server
from quire.cli import main, pd
own_server.COMMAND = (sys.executable, *sys.argv[1:3])
pd._PAUSE_S, pd._MOST_FAILURES = 0.01, 1
sys.exit(main(["pd", *sys.argv[3:]]))
"""


@pytest.fixture
def quire(capsys, monkeypatch, tmp_path):
    for option in OPTIONS.values():
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.delenv("QUIRE_CONFIG", raising=False)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return command(capsys, monkeypatch)


def model_of(folder: Path) -> Path:
    """A directory that passes for a model; nothing loads it here."""
    folder.mkdir(exist_ok=True)
    save_file({"w": np.zeros(4, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


# ---- route ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--decode", "http://a:1"], "--decode is given without --prefill"),
        (["--server", "localhost"], "write it as http://host:port"),
        (
            ["--server", "http://a:1", "--admin-key-file", "/no/such"],
            "the admin key cannot be read",
        ),
    ],
)
def test_a_router_that_was_asked_wrongly_is_one_sentence(quire, arguments, wanted):
    ran = quire("route", *arguments)
    assert ran.code == 2
    assert wanted in ran.sentence


def test_route_starts_what_was_asked_for(quire, monkeypatch, tmp_path):
    got = {}

    async def route(config, listen, on_ready):
        from quire.router.fleet import Fleet

        got.update(config=config, listen=listen)
        on_ready("http://127.0.0.1:9", Fleet(config, None))

    monkeypatch.setattr("quire.router.run.route", route)
    monkeypatch.setenv("QUIRE_ADMIN_KEY", "root")
    servers = [
        "--prefill",
        "http://a:1",
        "--decode",
        "http://b:1,http://c:1",
        "--decode",
        "http://d",
    ]
    more = ["--retries", "1", "--max-connections", "20000", "--max-index-pages", "500"]
    ran = quire("route", *servers, "--port", "9", *more)
    assert ran.code == 0
    config = got["config"]
    assert config.prefill == ("http://a:1",)
    assert config.decode == ("http://b:1", "http://c:1", "http://d")
    assert (config.admin_key, config.retries, got["listen"].port) == ("root", 1, 9)
    assert (got["listen"].max_connections, config.max_index_pages) == (20_000, 500)
    assert "base_url=http://127.0.0.1:9/v1" in ran.out
    assert "http://c:1" in ran.out
    assert "root" not in ran.out + ran.err
    (tmp_path / "key").write_text("other\n")
    quire("route", "--server", "http://a", "--admin-key-file", tmp_path / "key")
    config = got["config"]
    assert (config.admin_key, config.admin_key_file) == (None, tmp_path / "key")


# ---- what pd starts ------------------------------------------------------------------------------


def test_both_servers_fit_and_share_the_store(tmp_path):
    half = dataclasses.replace(LAPTOP, available_bytes=LAPTOP.available_bytes // 2)
    settings = effective(Settings(), half)
    starts = plan(settings, LAPTOP, tmp_path, (1, 2), {"A": "b"})
    for start, tp in zip(starts, ("1", "2"), strict=True):
        options = dict(zip(start.arguments[::2], start.arguments[1::2], strict=True))
        assert options["--role"] == start.name
        assert options["--tp"] == tp
        assert options["--port"] == options["--peer-port"] == "0"
        assert options["--store"] == "file:///home/ada/.cache/quire/store?max=10GiB"
        assert int(options["--device-memory"]) + int(options["--host-memory"]) <= 8 * GIB
        assert start.environ["A"] == "b"
        assert "QUIRE_THREADS" in start.environ
    assert [start.name for start in starts] == ["prefill", "decode"]


def test_gpus_are_divided_or_shared(tmp_path):
    model = model_of(tmp_path)
    box = dataclasses.replace(LAPTOP, gpus=(10 * GIB, 10 * GIB, 10 * GIB))
    apart = plan(effective(Settings(), box), box, model, (1, 2), {})
    assert [start.environ["CUDA_VISIBLE_DEVICES"] for start in apart] == ["0", "1,2"]
    assert "--device-memory" not in apart[0].arguments  # each takes what its GPUs have
    named = plan(effective(Settings(), box), box, model, (1, 1), {"CUDA_VISIBLE_DEVICES": "4,6,7"})
    assert [start.environ["CUDA_VISIBLE_DEVICES"] for start in named] == ["4", "6"]
    one = dataclasses.replace(box, gpus=(10 * GIB,))
    for start in plan(effective(Settings(), one), one, model, (1, 1), {}):
        assert "CUDA_VISIBLE_DEVICES" not in start.environ
        size = int(start.arguments[start.arguments.index("--device-memory") + 1])
        assert 0 < size <= 4 * GIB
    tiny = dataclasses.replace(box, gpus=(10,))
    with pytest.raises(MemoryBudgetError, match="use a smaller model"):
        plan(effective(Settings(), tiny), tiny, model, (1, 1), {})


def test_pd_that_was_asked_wrongly_is_one_sentence(quire):
    assert (
        "give host_memory a size" in quire("pd", "--host-memory", "0", "--store", "none").sentence
    )


# ---- how they live and end -----------------------------------------------------------------------


WAIT_S = 120.0
"""Only how long a broken test takes to fail."""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@contextlib.contextmanager
def running(folder: Path):
    """`quire pd` with fakes; the folder has the fakes' process ids."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environ |= {"PYTHONPATH": path, "QUIRE_CACHE_DIR": str(folder / "cache")}
    arguments = ["--model", str(model_of(folder / "m")), "--port", "0", "--store", "none"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(FAKE), str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pids(folder: Path) -> list[int]:
    return [int((folder / name).read_text()) for name in ("prefill", "decode")]


def read_until(stream, text: str) -> str:
    seen = ""
    while text not in seen:
        line = stream.readline()
        assert line, f"it ended after {seen!r}"
        seen += line
    return seen


def test_it_says_what_runs_where_answers_and_ends_with_ctrl_c(tmp_path):
    import httpx

    with running(tmp_path) as process:
        out = read_until(process.stdout, "Stop it")
        assert all(word in out for word in ("router", "prefill", "decode", "tcp://127.0.0.1:"))
        assert all(str(pid) in out for pid in pids(tmp_path))
        key_file = Path(out.partition("Admin key")[2].split()[0])
        assert key_file.is_relative_to(tmp_path / "cache")
        url = out.partition("base_url=")[2].split()[0]
        body = {"model": "tiny", "prompt": "p"}
        assert httpx.post(f"{url}/completions", json=body, timeout=WAIT_S).status_code == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, err
        assert "prefill: loading for prefill" in err
        assert not key_file.exists()
        assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_server_that_dies_is_started_again_where_it_was(tmp_path):
    import httpx

    with running(tmp_path) as process:
        out = read_until(process.stdout, "Stop it")
        before = pids(tmp_path)
        for victim in before:
            os.kill(victim, signal.SIGKILL)
        said = read_until(process.stderr, "server is back") + read_until(
            process.stderr, "server is back"
        )
        for name in ("prefill", "decode"):
            sentence = f"the {name} server was killed by signal 9: it is started again"
            assert f'"message": "{sentence}"' in said
        assert not set(before) & set(pids(tmp_path))
        url = out.partition("base_url=")[2].split()[0]
        body = {"model": "tiny", "prompt": "p"}
        until(lambda: httpx.post(f"{url}/completions", json=body, timeout=WAIT_S).is_success)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_server_that_dies_again_and_again_ends_all_with_a_clear_error(tmp_path):
    with running(tmp_path) as process:
        read_until(process.stdout, "Stop it")
        (tmp_path / "prefill-fails").touch()
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 2
        assert "device_memory holds 3 pages: give it more, again and again" in err
        assert "Traceback" not in err
        assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_server_that_does_not_start_says_why(tmp_path):
    (tmp_path / "decode-fails").touch()
    with running(tmp_path) as process:
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 2
        assert "the decode server ended with code 2: device_memory holds 3 pages: give it" in err
        assert "Traceback" not in err


def test_the_servers_do_not_outlive_it_however_it_ends(tmp_path):
    with running(tmp_path) as process:
        read_until(process.stdout, "Stop it")
        process.kill()
        until(lambda: not any(alive(pid) for pid in pids(tmp_path)))


def test_a_child_that_says_something_else_is_an_error():
    async def main():
        child = Child("decode", lambda name, line: None)
        await child.start([sys.executable, "-c", "print('hello')"], dict(os.environ))
        try:
            await child.ready()
        finally:
            await child.stop()

    with pytest.raises(EngineError, match="the decode server said b'hello"):
        asyncio.run(main())
