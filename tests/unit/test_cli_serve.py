"""`quire serve`, `quire config`, `quire bench serve`: what a person sees, right or wrong."""

import json
import socket
from pathlib import Path

import pytest

from quire.engine.messages import EngineInfo, TierStatus
from quire.errors import EngineError
from quire.settings import OPTIONS
from unit.bench.fake_server import Fake, chunk, event, serving
from unit.cli_support import command

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quire(capsys, monkeypatch, tmp_path):
    for option in OPTIONS.values():
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.delenv("QUIRE_CONFIG", raising=False)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return command(capsys, monkeypatch)


# ---- config --------------------------------------------------------------------------------------


def test_config_shows_values_and_what_set_them(quire, tmp_path, monkeypatch):
    path = tmp_path / "quire.toml"
    path.write_text("tp = 2\nmax_running = 7\n")
    monkeypatch.setenv("QUIRE_STORE", "none")
    ran = quire("config", "--config", path, "--page-size", "64")
    assert (ran.code, ran.err) == (0, "")
    rows = {line.split()[0]: line for line in ran.out.splitlines() if line.strip()}
    assert set(OPTIONS) <= rows.keys()
    assert "--page-size" in rows["page_size"]
    assert "QUIRE_STORE" in rows["store"]
    assert f"{path}: max_running" in rows["max_running"]
    assert "default (auto)" in rows["host_memory"]
    assert rows["port"].split() == ["port", "8000", "default"]


def test_config_as_json(quire, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "hunter2")
    monkeypatch.setenv("QUIRE_PROT", "80")
    ran = quire("config", "--json", "--host-memory", "1GiB")
    found = ran.json["options"]
    assert list(found) == list(OPTIONS)
    assert found["host_memory"] == {
        "value": 1 << 30,
        "source": "command line",
        "where": "--host-memory",
    }
    assert found["api_key"]["value"] == "set (hidden)"
    assert found["admin_key"]["value"] == "not set"
    assert found["write_policy"]["value"] == "write_through"
    assert found["max_context"]["value"] is None
    assert "QUIRE_PORT" in ran.json["warnings"][0]
    assert "hunter2" not in ran.out + ran.err + quire("config").out


def test_config_shows_brackets_as_they_are(quire):
    ran = quire("config", "--model", "/models/a[/b]", "--store", "redis://[fd00::5]:7000")
    rows = {line.split()[0]: line for line in ran.out.splitlines() if line.strip()}
    assert "/models/a[/b]" in rows["model"]
    assert "redis://[fd00::5]:7000" in rows["store"]


def test_a_store_is_given_once_for_each(quire):
    ran = quire("config", "--json", "--store", "memory://", "--store", "file:///x?write=back")
    assert ran.json["options"]["store"]["value"] == "memory:// file:///x?write=back"


def test_config_prints_the_reference(quire):
    assert quire("config", "--reference").out == (ROOT / "docs/configuration.md").read_text()


def test_config_makes_nothing(quire, tmp_path):
    assert quire("config").code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["serve", "config"])
def test_a_wrong_option_is_one_sentence(name, quire, tmp_path):
    assert "--port is '99999': give a whole number" in quire(name, "--port", "99999").sentence
    (tmp_path / "c.toml").write_text("prot = 1")
    ran = quire(name, "--config", tmp_path / "c.toml")
    assert ran.code == 2
    assert "did you mean port?" in ran.sentence
    ran = quire(name, "--host-memory", "0", "--store", "file:///x")
    assert "give host_memory a size, or set store to none" in ran.sentence


def test_serve_says_where_the_other_options_are(quire):
    text = " ".join(quire("serve", "--help").out.split())
    assert "quire config lists them all" in text
    for option in OPTIONS.values():
        assert (option.flag is not None) == (f" --{option.name.replace('_', '-')} " in text)


# ---- serve ---------------------------------------------------------------------------------------


def info(store: str = "", host_pages: int = 200) -> EngineInfo:
    tiers = [
        TierStatus("device", 1 << 20, 100, 0, 0),
        TierStatus("host", 1 << 20, host_pages, 0, 0),
    ]
    return EngineInfo("m", "f" * 64, "cpu", "float32", 1, 16, 99, 8192, tiers, store)


@pytest.fixture
def model(tmp_path):
    """A directory that passes for a model; nothing loads it here."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def started(monkeypatch):
    """What the server was started with, in place of starting one."""
    got = {"info": info(), "code": 0, "while_it_serves": lambda url: None}

    async def serve(engine_config, server_config, on_ready, on_progress=None):
        got.update(engine=engine_config, server=server_config)
        on_progress("loading the model", 0.5)
        on_ready("http://127.0.0.1:8000", got["info"])
        got["while_it_serves"]("http://127.0.0.1:8000")
        return got["code"]

    monkeypatch.setattr("quire.server.run.serve", serve)
    return got


def test_serve_starts_what_was_asked_for_and_says_where(quire, model, started, monkeypatch):
    monkeypatch.setenv("QUIRE_ADMIN_KEY", "root")
    monkeypatch.setenv("QUIRE_REQUEST_TIMEOUT", "7")
    started["info"] = info("file:///var/q?max=1GiB")
    ran = quire("serve", "--model", model, "--port", "0", "--store", "file:///var/q?max=1GiB")
    assert ran.code == 0
    engine, server = started["engine"], started["server"]
    assert (engine.model, engine.name) == (str(model), "m")
    assert engine.store == "file:///var/q?max=1GiB"
    assert (server.admin_key, server.port, server.request_timeout_s) == ("root", 0, 7.0)
    assert "quire: loading the model" in ran.err
    assert "base_url=http://127.0.0.1:8000/v1\n" in ran.out
    assert "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type" in ran.out
    assert "http://127.0.0.1:8000/ui, or: quire top http://127.0.0.1:8000\n" in ran.out
    lines = [line.split() for line in ran.out.splitlines() if line.startswith(" L")]
    assert [line[:5] for line in lines] == [
        ["L1", "device", "100", "MiB", "100"],
        ["L2", "host", "200", "MiB", "200"],
        ["L3", "store", "1", "GiB", "1,024"],
    ]
    assert [line[5] for line in lines] == ["1,600", "3,200", "16,384"]
    assert "root" not in ran.out


def key_file_of(out: str) -> Path:
    (line,) = [line for line in out.splitlines() if line.startswith("Admin key")]
    return Path(line.removeprefix("Admin key").strip())


def test_a_key_file_may_be_named(quire, model, started, monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_ADMIN_KEY_FILE", str(tmp_path / "mine.key"))
    started["while_it_serves"] = lambda url: modes.append((tmp_path / "mine.key").stat().st_mode)
    modes = []
    assert key_file_of(quire("serve", "--model", model, "--port", "0").out) == tmp_path / "mine.key"
    assert [mode & 0o777 for mode in modes] == [0o600]


def test_without_an_admin_key_one_is_made_for_this_user_alone_c49(quire, model, started, tmp_path):
    seen = []

    def look(url):
        (file,) = tmp_path.rglob("8000")
        seen.append((file, file.read_text().strip(), file.stat().st_mode & 0o777))

    started["while_it_serves"] = look
    out = quire("serve", "--model", model, "--port", "0").out
    first, mode = seen[0][1:]
    assert mode == 0o600
    assert started["server"].admin_key == first
    assert len(first) >= 32
    assert key_file_of(out) == seen[0][0]
    assert first not in out
    assert not key_file_of(out).exists()  # it was for that one life
    quire("serve", "--model", model, "--port", "0")
    assert seen[1][1] != first


def test_a_key_that_cannot_be_written_is_said_and_the_server_serves(
    quire, model, started, monkeypatch, tmp_path
):
    (tmp_path / "occupied").mkdir()
    monkeypatch.setenv("QUIRE_ADMIN_KEY_FILE", str(tmp_path / "occupied"))
    ran = quire("serve", "--model", model, "--port", "0")
    assert ran.code == 0
    assert "set admin_key, or set admin_key_file" in ran.err
    assert "Admin key" not in ran.out
    assert not list(tmp_path.glob("occupied.*"))


def test_the_example_can_be_sent(quire, model, started, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    out = quire("serve", "--model", model, "--port", "0").out
    (line,) = [line for line in out.splitlines() if "curl" in line]
    assert '-H "Authorization: Bearer $QUIRE_API_KEY"' in line
    assert json.loads(line.split("-d '")[1].rstrip("'"))["model"] == "m"
    assert "secret" not in out


def test_tiers_that_are_off_are_said_to_be(quire, model, started):
    started["info"] = info(host_pages=0)
    ran = quire("serve", "--model", model, "--port", "0", "--host-memory", "0")
    lines = [line.split() for line in ran.out.splitlines() if line.startswith((" L2", " L3"))]
    assert lines == [["L2", "host", "off"], ["L3", "store", "off"]]


def test_the_default_store_gets_its_directory(quire, model, started, tmp_path):
    quire("serve", "--model", model, "--port", "0")
    assert started["engine"].store.startswith(f"file://{tmp_path}/cache/store?max=")
    assert (tmp_path / "cache").is_dir()


def test_a_server_that_ends_badly_is_exit_code_1(quire, model, started):
    started["code"] = 1
    assert quire("serve", "--model", model, "--port", "0").code == 1


def test_an_engine_that_does_not_start_is_one_sentence(quire, model, started, monkeypatch):
    async def serve(*_, **__):
        raise EngineError("device_memory holds 3 pages: give it more")

    monkeypatch.setattr("quire.server.run.serve", serve)
    ran = quire("serve", "--model", model, "--port", "0")
    assert ran.code == 2
    assert "give it more" in ran.sentence


def test_a_port_in_use_is_said_before_the_model_is_looked_at(quire, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ran = quire("serve", "--port", port, "--model", tmp_path / "none")
    assert ran.code == 2
    assert f"127.0.0.1:{port}" in ran.sentence


def test_a_model_that_is_not_there_is_one_sentence(quire, tmp_path):
    ran = quire("serve", "--port", "0", "--model", tmp_path / "none")
    assert ran.code == 2
    assert "does not exist: give the path" in ran.sentence


# ---- bench serve and ttft ------------------------------------------------------------------------

SMALL = ["--count", "2", "--rounds", "2", "--system-tokens", "32", "--output-tokens", "4"]


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def url(fake):
    with serving(fake) as address:
        yield address


def test_bench_serve_prints_its_tables_or_its_object(quire, url, tmp_path):
    ran = quire("bench", "serve", url, *SMALL, "--plots", tmp_path / "p")
    assert ran.code == 0
    assert "TTFT" in ran.out
    assert str(tmp_path / "p" / "ttft_by_round.png") in ran.out
    assert len(list((tmp_path / "p").glob("*.png"))) == 3
    ran = quire("bench", "serve", url, *SMALL, "--json")
    assert (ran.json["good"], ran.json["plots"], ran.err) == (4, [], "")


def test_an_answer_of_wrong_form_is_exit_code_1_and_a_failure_is_not(quire, fake, url):
    def answer(body):
        return bad if len(fake.requests) == 3 else fake.answer(body)

    fake.stream = answer
    bad = [event({"error": {"message": "busy"}})]
    assert quire("bench", "serve", url, *SMALL, "--concurrency", "1").code == 0
    fake.requests.clear()
    bad = [event(chunk("a"))]
    ran = quire("bench", "serve", url, *SMALL, "--concurrency", "1")
    assert ran.code == 1
    assert "1 of 4 malformed" in ran.out


def test_the_key_for_a_server_comes_from_the_environment(quire, fake, url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    quire("bench", "serve", url, *SMALL)
    monkeypatch.setenv("QUIRE_API_KEY", "ours")
    quire("bench", "serve", url, *SMALL)
    assert fake.keys == {"Bearer theirs", "Bearer ours"}


def test_what_cannot_be_measured_is_one_sentence(quire):
    assert "write it as http://" in quire("bench", "serve", "localhost").sentence
    assert "cannot be reached" in quire("bench", "serve", "http://127.0.0.1:9").sentence
    ran = quire("bench", "serve", "http://127.0.0.1:9", "--workload", "poems")
    assert "use synthetic or agent or mtbench" in ran.sentence
    assert "is not a URL (Invalid port" in quire("bench", "serve", "http://localhost:x").sentence


def test_a_directory_for_the_store_that_is_none_is_one_sentence(quire, tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "none"):
        ran = quire("bench", "ttft", "--directory", tmp_path / name)
        assert ran.code == 2
        assert "give --directory a directory that this user can write to" in ran.sentence


def test_what_is_not_installed_is_one_sentence(quire, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = quire("bench", "serve", "http://127.0.0.1:9", "--plots", "p")
    assert "this needs httpx and matplotlib" in ran.sentence
    assert "pip install 'quire[bench]'" in ran.sentence
    assert "pip install 'quire[serve]'" in quire("serve").sentence
    assert "pip install 'quire[serve,bench]'" in quire("bench", "ttft").sentence


@pytest.mark.parametrize("name", ["serve", "pd"])
@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("file:///proc/x", "cannot use '/proc/x' as a store"),
        ("memory://?mx=1", "unknown option 'mx'"),
        ("memory://?write=sometimes", "give one of"),
    ],
)
def test_a_store_that_cannot_be_used_is_said_before_a_model_is_loaded(
    quire, monkeypatch, name, url, wanted
):
    def resolve(*_):
        raise AssertionError("a model was looked for")

    monkeypatch.setattr("quire.models.resolve", resolve)
    ran = quire(name, "--store", url, "--port", "0", "--host-memory", "64MiB")
    assert ran.code == 2
    assert "store: " in ran.sentence
    assert wanted in ran.sentence
