"""`quire top`: the figures of a server as a person reads them."""

import io

import pytest
from rich.console import Console

from quire.cli.toplines import read, shown
from unit.cli_support import command
from unit.server.scripted import Rig

BEFORE = """
quire_engine_up 1
quire_running_requests 2
quire_tier_bytes{tier="device",component="full"} 1048576
quire_tier_used_bytes{tier="device",component="full"} 524288
quire_prompt_tokens_total 100
quire_cached_tokens_total{tier="device"} 0
quire_generated_tokens_total 10
quire_store_attached 1
quire_store_events_total{event="breaker_is_open"} 1
quire_store_events_total{event="error:TimeoutError"} 4
"""
AFTER = (
    BEFORE.replace("total 100", "total 300")
    .replace('"device"} 0', '"device"} 150')
    .replace("generated_tokens_total 10", "generated_tokens_total 30")
)


def text(before: str | None, after: str) -> str:
    console = Console(file=io.StringIO(), width=120)
    earlier = None if before is None else read(before, 10.0)
    console.print(shown("http://a:1", earlier, read(after, 12.0)))
    return console.file.getvalue()


def test_rates_are_those_since_the_last_look():
    said = text(BEFORE, AFTER)
    assert "2 running" in said
    assert "device  █" in said
    assert "512 KiB" in said
    assert "found on device 75 %" in said
    assert "Tokens said: 20 (10.0/s)" in said
    assert "does not answer" in said
    assert "error:TimeoutError 4" in said


def test_a_server_that_has_started_anew_counts_from_nothing():
    assert "Prompt tokens since the last look: 100," in text(AFTER, BEFORE)


def test_it_reads_what_a_real_server_exposes():
    said = text(None, Rig().request("GET", "/metrics").text)
    assert "THE ENGINE IS GONE" not in said
    assert "device" in said


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nowhere", "http://[::1"])
def test_nobody_there_is_one_sentence(capsys, monkeypatch, url):
    ran = command(capsys, monkeypatch)("top", url, "--once")
    assert ran.code == 2
    assert "does not answer" in ran.sentence
