"""Sentences that people read, each of which was wrong once; where they stand, not how they look."""

import asyncio
import logging
import re
import signal
import sys
from pathlib import Path

import pytest
import typer

from engine_support import TinyEngine
from quire.cli.app import app
from quire.engine import process
from quire.engine.messages import EngineStartFailed, Finish
from quire.errors import StoreError
from quire.models.gguf import converted_dir, file_digest
from quire.own_server import Child
from quire.router.fleet import Health, Member, MemberSide, MemberState
from quire.server.config import ServerConfig
from quire.settings import OPTIONS
from unit.cli_support import command
from unit.server.scripted import Rig, error_of

ROOT = Path(__file__).parents[2]
PROMPT = list(range(1, 30))


@pytest.fixture
def quire(capsys, monkeypatch, tmp_path):
    for option in OPTIONS.values():
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return command(capsys, monkeypatch)


def ended(program: str) -> str:
    """What is said of a child that ran this."""

    async def main() -> str:
        child = Child("decode", lambda name, line: None)
        await child.start([sys.executable, "-c", program], {})
        try:
            return await child.gone()
        finally:
            await child.stop()

    return asyncio.run(main())


def test_the_last_words_of_a_child_explain_an_end_but_no_kill():
    said = "import os, sys; sys.stderr.write('quire: ready\\n'); sys.stderr.flush(); "
    assert ended(said + "os.kill(os.getpid(), 9)") == "the decode server was killed by signal 9"
    assert ended(said + "sys.exit(2)") == "the decode server ended with code 2: ready"


def test_a_child_that_says_more_in_a_line_than_anybody_reads_goes_on_and_is_heard():
    said = "import sys; sys.stderr.write('x' * (3 << 20) + '\\nquire: no room\\n'); sys.exit(2)"
    assert ended(said) == "the decode server ended with code 2: no room"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"messages": []}, "messages should have at least 1 item, not 0"),
        ({"stop_token_ids": [1] * 99}, "stop_token_ids should have at most 64 items, not 99"),
    ],
)
def test_what_is_wrong_with_a_body_is_said_of_its_field(fields, wanted):
    response = Rig().chat(**fields)
    assert response.status_code == 400
    assert error_of(response)["message"] == wanted


def test_a_body_that_is_too_large_names_no_option_that_does_not_exist():
    rig = Rig(config=ServerConfig(max_body_bytes=1024))
    message = error_of(rig.complete("x" * 2000))["message"]
    assert "1 KiB" in message
    assert [word for word in re.findall(r"\w+_\w+", message) if word not in OPTIONS] == []


def test_the_table_of_statuses_has_every_status():
    table = (ROOT / "docs/serving.md").read_text()
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M)
              for code in row.split(",")}  # fmt: skip
    rooms = ("server", "web", "text", "router")
    sources = [path for room in rooms for path in (ROOT / "src/quire" / room).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    said = re.findall(r"ApiError\(\s*\d{3}|refusal\b.*", text)
    raised = {int(code) for found in said for code in re.findall(r"\b\d{3}\b", found)}
    assert {400, 404, 409, 429, 502, 503} <= raised <= listed


def test_a_timeout_names_the_time_that_was_asked_for():
    with TinyEngine() as tiny:
        asked = tiny.ask(PROMPT, 100, timeout_s=0.3)
        tiny.step(2)
        tiny.clock.ahead_s += 0.4
        tiny.run()
        assert tiny.last(asked).finish is Finish.TIMEOUT
        assert tiny.last(asked).error == "not finished within 0.3 s"


def test_a_server_that_is_down_runs_nothing_and_one_that_is_back_is_said(caplog):
    async def main() -> None:
        member = Member("http://a:1", MemberSide.SERVER)
        with caplog.at_level(logging.WARNING, "quire.router"):
            member.report(Health("ok", running=3, waiting=2))
            member.set(MemberState.UP)
            assert not caplog.records  # all is as it should be
            member.set(MemberState.DOWN, "cannot be connected to")
            shown = member.as_dict()
            assert (shown["running"], shown["waiting"], member.load) == (0, 0, 0)
            member.set(MemberState.UP)
        assert [record.message for record in caplog.records] == [
            "server http://a:1 is down: cannot be connected to",
            "server http://a:1 is up",
        ]

    asyncio.run(main())


def commands_below(command, *above: str) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [above, *(each for name in below for each in commands_below(below[name], *above, name))]


@pytest.mark.parametrize("arguments", commands_below(typer.main.get_command(app)), ids=" ".join)
def test_a_switch_takes_no_value_in_the_help(quire, arguments):
    said = quire(*arguments, "-h").out
    assert "--help" in said
    assert "-h " in said
    assert "bool" not in said


def test_config_says_where_a_converted_model_is(quire, tmp_path):
    embedded = tmp_path / "cache/models/SmolLM2-135M-Instruct-b179c9523d0e6a0f"
    assert f"will be converted into {embedded}" in quire("config").out
    embedded.mkdir(parents=True)
    assert f"is converted in {embedded}" in quire("config").out
    packed = tmp_path / "own.gguf"
    packed.write_bytes(b"GGUF")
    assert quire("config", "--model", packed, "--json").json["model_directory"] == str(
        embedded.parent
    )
    made = converted_dir("own", file_digest(packed), tmp_path / "cache")
    made.mkdir()
    assert f"is converted in {made}" in quire("config", "--model", packed).out
    assert quire("config", "--model", made, "--json").json["model_directory"] is None


def test_an_engine_that_cannot_start_is_not_ended_twice(monkeypatch):
    """Whoever is told so ends it: what was said must stay the last word."""
    heard = []

    class Line:
        def send(self, message) -> None:
            heard.append((message, signal.getsignal(signal.SIGTERM)))

    def build_engine(config, progress):
        raise StoreError("cannot use '/proc/x'")

    monkeypatch.setattr("quire.engine.build.build_engine", build_engine)
    before = signal.getsignal(signal.SIGTERM)
    startup = type("Startup", (), {"config": None})()
    try:
        assert process._build_and_serve(startup, Line(), None) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [(EngineStartFailed("cannot use '/proc/x'"), signal.SIG_IGN)]


def test_prompt_tokens_are_all_of_them_wherever_they_are_counted():
    with TinyEngine() as tiny:
        for _ in range(2):
            tiny.answer(PROMPT, 2)
        counted = tiny.engine.status().counters
        assert "prompt_tokens" not in counted
        assert len(PROMPT) < counted["computed_prompt_tokens"] < 2 * len(PROMPT)
