"""/ui and `quire top` against a real server under the load of `quire bench serve`, in a real
browser, which stays there while the server is killed and started again; the audit beside it.

QUIRE_SCREENSHOTS=DIR keeps pictures of it: those of docs/ui.md were made so.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import HOW_TO, Browser, find
from e2e.server.harness import API_KEY, TIMEOUT_S, ServerProcess, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find() is None, reason=HOW_TO),
]


def started(folder: Path, port: int = 0) -> contextlib.AbstractContextManager[ServerProcess]:
    engine = {"store": f"file://{folder}/store?max=200MB", "audit": 20}
    return running(engine, {"log_requests": True, "port": port})


@contextlib.contextmanager
def load(server: ServerProcess, *options: str) -> Iterator[dict[str, Any]]:
    """Sessions that share their beginning, the same ones every time; the result, at the end."""
    words = [
        "bench",
        "serve",
        server.url,
        "--json",
        "--system-tokens",
        "96",
        "--prompt-tokens",
        "48",
    ]
    bench = subprocess.Popen(
        [sys.executable, "-m", "quire.cli", *words, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    found: dict[str, Any] = {}
    try:
        yield found
        said, _ = bench.communicate(timeout=TIMEOUT_S)
        assert bench.returncode == 0
        found |= json.loads(said)
        assert found["good"] == found["requests"]
    finally:
        bench.kill()
        bench.communicate()


def text(page: Browser, name: str) -> str:
    return page.run(f"document.getElementById('{name}').textContent")


def look(page: Browser, times: int) -> None:
    """Until it has asked so many times more."""
    looks = page.run("Number(document.body.dataset.looks)")
    page.until(f"Number(document.body.dataset.looks) > {looks + times}")


def metric(server: ServerProcess, start: str) -> float:
    with server.client() as http:
        lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def under_load(page: Browser, server: ServerProcess) -> None:
    page.open(f"{server.url}/ui")
    page.run(f"sessionStorage.setItem('admin-key', '{API_KEY}')")
    page.open(f"{server.url}/ui?again")
    page.until("document.getElementById('flight').textContent.includes('running')")
    page.until("document.querySelectorAll('#hits rect.device').length > 3")
    page.until("document.querySelectorAll('#tree rect').length > 1")
    page.until("document.querySelectorAll('#ttft polyline')[0].getAttribute('points')")
    look(page, 3)
    assert "Answers" in text(page, "store")


def talk(page: Browser) -> None:
    said = "'Où est la quire, and how many sheets has it?'"
    page.run(f"document.getElementById('say').value = {said}")
    for _ in range(2):
        page.run("document.getElementById('over').click()")
        page.run("document.getElementById('chat').requestSubmit()")
        page.until("document.getElementById('cost').textContent.includes('whole answer')")
    page.until("document.querySelector('#prompt .device') !== null")
    assert "Où est la quire" in text(page, "prompt")
    page.run("document.getElementById('say').value = 'And who makes it?'")
    page.run("document.getElementById('chat').requestSubmit()")
    page.until("document.getElementById('prompt').textContent.includes('who makes it')")
    assert "Où est la quire" in text(page, "prompt"), "it is a conversation"
    page.run("document.querySelector('#tree rect').dispatchEvent(new Event('click'))")


def pictures(page: Browser, folder: Path) -> None:
    page.picture(folder / "ui.png")
    media = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.call("Emulation.setEmulatedMedia", {"features": media})
    page.resize(390, 844)
    page.until("document.documentElement.scrollWidth <= innerWidth")
    look(page, 1)  # drawn anew, for the narrow screen
    page.picture(folder / "ui-phone-dark.png")
    # The tree and the conversation are the last on the page.
    page.run("document.getElementById('tree-key').scrollIntoView()")
    page.picture(folder / "ui-phone-dark-tree.png")


def top(server: ServerProcess) -> str:
    return subprocess.run(
        [sys.executable, "-m", "quire.cli", "top", server.url, "--once"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "110"},
    ).stdout


def test_under_load_it_follows_without_a_complaint_and_survives_a_kill(tmp_path):
    folder = os.environ.get("QUIRE_SCREENSHOTS")
    with Browser(width=1180, height=1480) as page:
        with started(tmp_path) as server:
            with load(server, "--count", "30", "--rounds", "3"):
                under_load(page, server)
                talk(page)
                if folder is not None:
                    pictures(page, Path(folder))
                said = top(server)
            assert "found on device" in said
            if folder is not None:
                (Path(folder) / "top.txt").write_text(said)
            assert page.errors == []
            server.stop(signal.SIGKILL)
            page.until("document.getElementById('state').textContent === 'gone'")
            port = server.port
        with started(tmp_path, port) as server:
            page.until("document.getElementById('state').textContent === 'serving'")
            look(page, 2)
            with load(server, "--count", "3", "--rounds", "1") as found:
                page.until("document.querySelector('#hits rect.store') !== null")
            # The same sessions as before, and of a server that knows nothing but its store.
            assert found["hit"]["store"] > 0
            assert page.run("document.getElementById('trouble').hidden")
            # A browser says of itself that nobody answered; the page has nothing to say.
            assert [said for said in page.errors if "net::ERR_" not in said] == []
            audited(server)


def audited(server: ServerProcess) -> None:
    """Idle now: every page that is looked at is what the model computes."""
    for _ in range(600):
        if metric(server, 'quire_engine_events_total{event="audited_pages"}') >= 5:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("nothing was audited")
    assert metric(server, 'quire_faults_total{operation="audit"') == 0
    log = server.log()
    assert '"logger": "quire.requests"' in log
    assert '"cached_by_tier"' in log
