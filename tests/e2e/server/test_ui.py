"""/ui and `quire top` against a real server under load, in a real browser; the audit beside it.

QUIRE_SCREENSHOTS=DIR keeps pictures of it: those of docs/ui.md were made so.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import HOW_TO, Browser, find
from e2e.server.harness import API_KEY, MODEL, ServerProcess, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find() is None, reason=HOW_TO),
]
SYSTEM = "You are a careful librarian who answers in one sentence. " * 8


@pytest.fixture
def looked_at(tmp_path) -> Iterator[ServerProcess]:
    engine = {"store": f"file://{tmp_path}/store?max=200MB", "audit": 20}
    with running(engine, {"log_requests": True}) as process:
        yield process


def load(server: ServerProcess, stop: threading.Event) -> None:
    """Sessions that share their beginning, one turn after the other, until told to stop."""
    with server.client() as http:
        number = 0
        while not stop.is_set():
            number += 1
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"Question {number % 7}: what is a quire?"},
            ]
            body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
            assert http.post("/v1/chat/completions", json=body).status_code == 200


def text(page: Browser, name: str) -> str:
    return page.run(f"document.getElementById('{name}').textContent")


def metric(server: ServerProcess, start: str) -> float:
    with server.client() as http:
        lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def test_under_load_it_follows_without_a_complaint(looked_at):
    server = looked_at
    folder = (
        Path(os.environ.get("QUIRE_SCREENSHOTS", "")) if "QUIRE_SCREENSHOTS" in os.environ else None
    )
    stop = threading.Event()
    asking = threading.Thread(target=load, args=(server, stop))
    asking.start()
    try:
        with Browser(width=1180, height=1480) as page:
            page.open(f"{server.url}/ui")
            page.run(f"sessionStorage.setItem('admin-key', '{API_KEY}')")
            page.open(f"{server.url}/ui?again")
            page.until("document.querySelectorAll('#hits rect.device').length > 3")
            page.until("document.querySelectorAll('#tree rect').length > 1")
            page.until("document.querySelectorAll('#ttft polyline')[0].getAttribute('points')")
            looks = page.run("Number(document.body.dataset.looks)")
            page.until(f"Number(document.body.dataset.looks) > {looks + 3}")
            page.until("document.getElementById('flight').textContent.includes('running')")
            assert "Answers" in text(page, "store")
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
            if folder is not None:
                page.picture(folder / "ui.png")
                media = [{"name": "prefers-color-scheme", "value": "dark"}]
                page.call("Emulation.setEmulatedMedia", {"features": media})
                page.resize(390, 844)
                page.until("document.documentElement.scrollWidth <= innerWidth")
                page.picture(folder / "ui-phone-dark.png")
            assert page.errors == []
        ran = subprocess.run(
            [sys.executable, "-m", "quire.cli", "top", server.url, "--once"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"COLUMNS": "110"},
        )
        assert "found on device" in ran.stdout
        if folder is not None:
            (folder / "top.txt").write_text(ran.stdout)
    finally:
        stop.set()
        asking.join()
    # Idle now: every page that is looked at is what the model computes.
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
