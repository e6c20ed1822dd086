"""`quire top`: the figures of a server as a person reads them."""

import io
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from quire.cli.toplines import shown
from quire.cli.toplooks import History, Look, read
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
quire_store_bytes{store="0",what="used"} 1073741824
quire_store_bytes{store="0",what="max"} 4294967296
quire_store_answers{store="0"} 0
quire_store_events_total{event="error:TimeoutError"} 4
quire_engine_events_total{event="computed_prompt_tokens"} 100
quire_engine_seconds_total{what="model"} 1.0
quire_time_to_first_token_seconds_count 1
quire_time_to_first_token_seconds_sum 1.0
"""
AFTER = (
    BEFORE.replace("total 100", "total 300")
    .replace('"device"} 0', '"device"} 150')
    .replace("generated_tokens_total 10", "generated_tokens_total 30")
    .replace("seconds_count 1", "seconds_count 2")
    .replace("seconds_sum 1.0", "seconds_sum 1.5")
    .replace('"computed_prompt_tokens"} 100', '"computed_prompt_tokens"} 150')
    .replace('what="model"} 1.0', 'what="model"} 1.5')
)
FIELDS = ["parent", "tenant", "first", "last", "device", "host", "store", "hits", "age"]
TREE = {
    "fields": FIELDS,
    "page_size": 16,
    "runs": [
        [-1, "alice", 0, 18, True, True, True, 9, 0],
        [0, "alice", 18, 36, False, True, True, 2, 1],
        [0, "alice", 18, 27, False, False, True, 1, 5],
    ],
}


def text(*looks: str | Look, width: int = 120, url: str = "http://a:1") -> str:
    """After so many looks, two seconds apart."""
    history = History()
    for i, each in enumerate(looks):
        look = each if isinstance(each, Look) else Look(read(each, 10.0 + 2 * i))
        history.take(look.metrics)
    console = Console(file=io.StringIO(), width=width)
    console.print(shown(url, look, history))
    return console.file.getvalue()


def test_rates_are_those_since_the_last_look():
    said = text(BEFORE, AFTER)
    assert "2 running" in said
    assert "device  █" in said
    assert "512 KiB" in said
    assert "found on device 75 %" in said
    assert "Tokens said: 20 (10.0/s)" in said
    assert "does not answer" in said
    assert "1 GiB of 4 GiB" in said


def test_what_a_store_fails_at_is_said_in_words():
    said = text(
        BEFORE
        + 'quire_store_events_total{event="breaker_opened"} 1\n'
        + 'quire_store_events_total{event="declined:breaker_open"} 6\n'
        + 'quire_store_events_total{event="written:ok"} 211\n'
        + 'quire_store_events_total{event="written:failed"} 198\n'
        + 'quire_store_events_total{event="read:miss"} 7\n',
        width=220,
    )
    assert "(the breaker has opened 1 time), 0 pages read, 211 written; " in said
    assert "; calls not made: 6 breaker open; calls that failed: 4 TimeoutError; " in said
    assert "; pages not written: 198 failed;" in said
    assert "miss" not in said


def test_it_says_what_the_first_token_would_have_taken_without_the_cache():
    # 150 tokens were found, and prompts are computed at 100 a second here.
    said = text(BEFORE, AFTER)
    assert "mean of 1: 0.500 s, without the cache about 2.000 s (estimated, at 100 tokens/s" in said


def test_hits_are_drawn_look_by_look():
    still = AFTER
    drawn = text(BEFORE, AFTER, still).splitlines()
    rows = drawn[next(i for i, line in enumerate(drawn) if "up to 100 tokens/s" in line) + 1 :][:6]
    # Up to three quarters found on the device, the rest computed; then nothing.
    assert [row[:1] for row in rows] == ["·", "·", "█", "█", "█", "█"]
    assert {row[1:].strip() for row in rows} == {""}


def test_a_server_that_has_started_anew_counts_from_nothing():
    assert "Prompt tokens since the last look: 100," in text(AFTER, BEFORE)


def test_the_tree_fits_a_narrow_terminal():
    said = text(Look(read(BEFORE, 1.0), tree=TREE), width=80)
    assert "\n" + "█" * 22 + "▓" * 22 + "  36 pages, used 9 times by alice\n" in said
    assert "\n" + " " * 22 + "▒" * 11 + "  27 pages, used 1 time by alice\n" in said


def test_with_the_key_there_are_requests_and_the_tree():
    request = {"id": "r7", "state": "restoring", "prompt_tokens": 43, "output_tokens": 4}
    requests = [request | {"age_s": 0.25}] * 9
    said = text(Look(read(BEFORE, 1.0), requests=requests, tree=TREE))
    assert re.search(r"r7 +restoring +43 +4 +0.2 s", said)
    assert "and 1 more" in said
    assert "9 restoring" in said  # not what the figures say, which are of another moment
    assert "3 runs of pages on 2 branches" in said
    assert "\n" + "█" * 36 + "▓" * 36 + "  36 pages, used 9 times by alice\n" in said
    assert "\n" + " " * 36 + "▒" * 18 + "  27 pages, used 1 time by alice\n" in said


def test_a_router_shows_its_servers():
    member = {"url": "http://b:2", "side": "decode", "state": "down", "reason": "does not answer"}
    metrics = """
quire_router_requests_in_flight 3
quire_router_requests_total{endpoint="/metrics",status="200"} 90
quire_router_requests_total{endpoint="/ready",status="503"} 9
quire_router_requests_total{endpoint="/v1/completions",status="200"} 40
quire_router_requests_total{endpoint="/v1/completions",status="503"} 1
quire_router_choices_total{side="decode",by="affinity"} 30
quire_router_choices_total{side="decode",by="load"} 10
"""
    member |= {"model": "m", "running": 3, "waiting": 0, "in_flight": 2}
    prefill = member | {"url": "http://c:3", "side": "prefill"}
    said = text(Look(read(metrics, 1.0), [member, prefill]))
    assert re.search(r"http://b:2 +decode +down: does not answer +m +3 +0", said)
    assert "2 under way, 41 answered, 1 of them failed" in said
    assert "cached: 30 of 40" in said


def test_brackets_in_what_servers_say_are_shown_as_they_are():
    member = {"url": "http://[fd00::5]:8000", "side": "decode", "state": "down"}
    member |= {"reason": "answered [/health]", "model": "m[b]"}
    member |= {"running": 0, "waiting": 0, "in_flight": 0}
    said = text(Look(read("", 1.0), [member]), url="http://[fd00::1]:1")
    assert "http://[fd00::1]:1   a router" in said
    assert re.search(r"http://\[fd00::5\]:8000 +decode +down: answered \[/health\] +m\[b\]", said)
    metrics = """
quire_handovers_total 1
quire_peer_link{peer="tcp://[fd00::3]:3",state="connected"} 1
"""
    assert "Peers: tcp://[fd00::3]:3 connected" in text(BEFORE + metrics)


def test_a_narrow_terminal_shows_which_servers_there_are():
    member = {"side": "server", "state": "down", "reason": "cannot be connected to"}
    member |= {"model": "SmolLM2-135M-Instruct", "running": 0, "waiting": 0, "in_flight": 0}
    urls = ["http://127.0.0.1:18500", "http://[fd00::5]:8000"]
    said = text(Look(read("", 1.0), [member | {"url": url} for url in urls]), width=80)
    assert [url for url in urls if url not in said] == []
    assert "running  waiting" in said


def test_hand_overs_are_told_with_their_bytes_and_peers():
    metrics = """
quire_handovers_total 4
quire_handover_seconds_total 2
quire_handover_bytes_total{direction="received"} 2097152
quire_peer_link{peer="tcp://c:3",state="connected"} 1
"""
    said = text(BEFORE + metrics)
    assert "4 received, 500 ms each; 2 MiB in, 0 B out" in said
    assert "Peers: tcp://c:3 connected" in said


def test_it_reads_what_a_real_server_exposes():
    said = text(Rig().request("GET", "/metrics").text)
    assert "THE ENGINE IS GONE" not in said
    assert "device" in said


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nowhere", "http://[::1"])
def test_nobody_there_is_one_sentence(capsys, monkeypatch, url):
    ran = command(capsys, monkeypatch)("top", url, "--once")
    assert ran.code == 2
    assert "does not answer" in ran.sentence


def test_a_key_file_that_is_not_there_is_one_sentence(capsys, monkeypatch, tmp_path):
    file = tmp_path / "key"
    ran = command(capsys, monkeypatch)("top", "--once", "--admin-key-file", str(file))
    assert ran.code == 2
    assert "the admin key cannot be read" in ran.sentence


def test_what_is_no_server_of_ours_is_one_sentence(capsys, monkeypatch):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(b'"ok"')

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            ran = command(capsys, monkeypatch)("top", url, "--once")
        finally:
            server.shutdown()
    assert ran.code == 2
    assert "does not answer" in ran.sentence
