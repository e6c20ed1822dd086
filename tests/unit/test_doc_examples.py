"""The examples of README.md and docs/: Python is run, configurations are read, requests are sent,
and commands are taken apart by the command line's own parser, without being carried out.

Those of docs/agents.md have tests of their own, since they are one conversation.
"""

import re
import shlex
import time
from itertools import pairwise
from pathlib import Path

import httpx
import openai
import pytest

from quire.settings import load
from unit.cli_support import taken_apart
from unit.server.scripted import ADMIN_KEY, MODEL, Rig
from unit.server.test_fuzz import answering

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REAL_MODEL = "SmolLM2-135M-Instruct"


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def lines(command: str) -> list[tuple[str, str]]:
    """(page, line): what somebody would type, without what is said of it behind."""
    found = []
    for page in PAGES:
        for block in blocks(page, "", "sh", "bash"):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                typed = re.split(r"\s{3,}(?=\S)|\s#", line.strip())[0]
                if typed.startswith(command + " "):
                    found.append((page.name, typed))
    return found


@pytest.mark.parametrize(("page", "line"), lines("quire"))
def test_commands_exist_with_these_options(page, line, monkeypatch):
    for name, value in {"$in_use": "0.3", "$policy": "write_back"}.items():
        line = line.replace(name, value)
    taken_apart(monkeypatch, shlex.split(line)[1:])


@pytest.mark.parametrize(("page", "line"), lines("quire"))
def test_no_shell_takes_an_address_apart(page, line):
    """Outside quotes a `?` is a pattern, which zsh refuses if no file fits; `&` ends a command."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", line)
    assert not re.search(r"[?&]", bare), page


def test_there_are_commands_to_test():
    assert len(lines("quire")) > 20


@pytest.mark.parametrize("block", blocks(ROOT / "docs/configuration.md", "toml"))
def test_configurations_are_read(block, tmp_path):
    file = tmp_path / "quire.toml"
    file.write_text(block)
    loaded = load({}, {}, file)
    assert loaded.settings.port == 8080


@pytest.mark.parametrize(("page", "line"), lines("curl"))
def test_requests_are_answered(page, line):
    key = line.replace("$(cat ~/.cache/quire/admin/8000)", ADMIN_KEY)
    typed = shlex.split(key.replace(REAL_MODEL, MODEL))[1:]
    url = next(word for word in typed if "8000/" in word)
    headers = dict(word.split(": ", 1) for before, word in pairwise(typed) if before == "-H")
    bodies = [word for before, word in pairwise(typed) if before == "-d"]
    path = "/" + url.partition("8000/")[2]
    rig = Rig(answering())
    method = "POST" if bodies else "GET"
    answer = rig.request(method, path, content="".join(bodies), headers=headers)
    assert answer.status_code == 200, answer.text


def test_the_first_request_of_serving(monkeypatch, capsys):
    rig = Rig()

    def handle(request: httpx.Request) -> httpx.Response:
        answer = rig.request(
            request.method, request.url.path, content=request.content, headers=request.headers
        )
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    (block,) = blocks(ROOT / "docs/serving.md", "python")
    with httpx.Client(transport=httpx.MockTransport(handle)) as transport:
        real = openai.OpenAI
        monkeypatch.setattr(openai, "OpenAI", lambda **said: real(**said, http_client=transport))
        exec(compile(block.replace(REAL_MODEL, MODEL), "docs/serving.md", "exec"), {})
    said, details = capsys.readouterr().out.splitlines()
    assert said == "hello there"
    assert "cached_tokens=" in details


def test_the_pieces_of_embedding():
    from quire import CacheConfig, CacheManager
    from quire.components import FullAttention, PoolSize, Recurrent, SlidingWindow

    step, build = blocks(ROOT / "docs/embedding.md", "python")
    names = {
        "config": CacheConfig(16, 4096, 16384),
        "time": time,
        "CacheManager": CacheManager,
        "FullAttention": FullAttention,
        "SlidingWindow": SlidingWindow,
        "Recurrent": Recurrent,
        "PoolSize": PoolSize,
    }
    exec(compile(build, "docs/embedding.md", "exec"), names)

    class Workers:
        submitted = None

        def poll(self):
            return []

        def submit(self, commands):
            self.submitted = commands

    names["workers"] = workers = Workers()
    exec(compile(step, "docs/embedding.md", "exec"), names)
    assert workers.submitted == []


def test_the_suite_of_stores():
    from quire.store.memory import MemoryStore
    from quire.testing.stores import StoreSuite

    (block,) = blocks(ROOT / "docs/stores.md", "python")
    names = {"MyStore": lambda *_: MemoryStore()}
    exec(compile(block, "docs/stores.md", "exec"), names)
    suite = names["TestMine"]()
    assert isinstance(suite, StoreSuite)
    assert suite.open() is not None


def test_every_python_example_is_run_somewhere():
    pages = {page.name for page in PAGES if blocks(page, "python")}
    assert pages == {"agents.md", "embedding.md", "serving.md", "stores.md"}
