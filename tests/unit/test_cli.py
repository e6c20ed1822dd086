"""The command line: helps, prints tables or one JSON object, and fails in one sentence.

Item by item, what a person can get wrong: the sentence names the fix, and nothing is lost.
"""

import dataclasses
import os
import re
import struct
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from quire import __version__
from quire.bench import core as bench_core
from quire.bench import report
from quire.cli import sim as cli_sim
from quire.cli.app import app
from quire.cli.output import start_bar
from quire.cli.route import members
from quire.sim import SimOptions, SimulationError, simulate
from quire.store import HEADER_BYTES, Blob, NewObject, ObjectName, Part, open_store
from quire.store.codec import seal
from quire.types import PageKey
from unit.bench.shown import shown
from unit.cli_support import command

COMMANDS = [
    [],
    ["bench"],
    ["bench", "core"],
    ["bench", "store"],
    ["bench", "transfer"],
    ["bench", "serve"],
    ["bench", "ttft"],
    ["bench", "hybrid"],
    ["bench", "pd"],
    ["store"],
    ["store", "ls"],
    ["store", "verify"],
    ["store", "clear"],
    ["store", "bench"],
    ["store", "doctor"],
    ["sim"],
    ["sim", "run"],
    ["demo"],
    ["serve"],
    ["config"],
    ["train-eagle"],
]


@pytest.fixture
def quire(capsys, monkeypatch):
    return command(capsys, monkeypatch)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "quire")
def test_every_command_explains_itself(command, quire):
    ran = quire(*command, "--help")
    assert ran.code == 0
    assert f"Usage: {' '.join(['quire', *command])}" in ran.out
    if len(command) == 2 or command in (["demo"], ["serve"], ["config"], ["train-eagle"]):
        assert f"Example: quire {' '.join(command)}" in ran.out


def test_a_list_of_commands_says_each_in_one_line():
    """What is broken in the source is broken in the middle of a sentence there."""

    def named(command, name):
        yield name, (command.help or "").split("\n\n")[0]
        for short, each in getattr(command, "commands", {}).items():
            yield from named(each, f"{name} {short}")

    found = dict(named(typer.main.get_command(app), "quire"))
    assert len(found) > len(COMMANDS)
    assert [name for name, sentence in found.items() if "\n" in sentence] == []


def test_the_version(quire):
    assert quire("--version").out == f"quire {__version__}\n"


# ---- store --------------------------------------------------------------------------------------


PART = Part("full", 0, 1, b"f" * 32, 8192)


def stock(folder: Path, count: int, part: Part = PART, first: int = 0) -> list[Path]:
    """Pages in a file store, sealed as a worker would; their files."""
    store = open_store(folder.as_uri())
    numbers = range(first, first + count)
    names = [ObjectName(PageKey(bytes([i]) * 32), part.component, 0, 1) for i in numbers]
    for i, name in enumerate(names):
        payload = memoryview(bytearray([i]) * part.page_bytes)
        header = memoryview(bytearray(HEADER_BYTES))
        seal(part, name.key, payload, header)
        store.put([NewObject(name, Blob(header, payload), None, 1)], deadline=1e18)
    store.close()
    return [folder / "objects" / name.text[:2] / name.text for name in names]


def test_brackets_in_what_servers_say_are_no_markup(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as at a terminal
    with start_bar() as tell:
        tell("prefill: cannot read [/etc/quire]", 0.5)
    assert "cannot read [/etc/quire]" in capsys.readouterr().err
    url, reason = "http://[fd00::5]:8000", "answered [/health]"
    member = SimpleNamespace(side="server", url=url, state="down", reason=reason, model="m[b]")
    said = shown([members(SimpleNamespace(members=[member]))])
    assert re.search(r"http://\[fd00::5\]:8000 +down: answered \[/health\] +m\[b\]", said)


def test_listing_a_store(quire, tmp_path):
    stock(tmp_path / "s", 3)
    url = (tmp_path / "s").as_uri()
    table = quire("store", "ls", url, "--limit", "2")
    assert table.code == 0
    assert "full in 1 shard(s): 3 pages, 36 KiB" in table.out
    assert "1 older ones not shown" in table.out
    found = quire("store", "ls", url, "--json").json
    assert found["num_objects"] == len(found["objects"]) == 3
    assert {len(item["key"]) for item in found["objects"]} == {64}


def test_verifying_a_store_finds_damage_and_moves_it_away_only_if_told(quire, tmp_path):
    files = stock(tmp_path / "s", 4)
    url = (tmp_path / "s").as_uri()
    assert quire("store", "verify", url).code == 0
    data = bytearray(files[1].read_bytes())
    data[5000] ^= 1
    files[1].write_bytes(data)
    ran = quire("store", "verify", url)
    assert ran.code == 1
    assert "3 of 4 pages are intact" in ran.out
    assert f"--quarantine {url}" in ran.sentence
    assert files[1].exists()
    found = quire("store", "verify", url, "--json").json
    assert (found["clean"], found["num_ok"], found["mismatches"]) == (False, 3, {"checksum": 1})
    assert "moved to quarantine" in quire("store", "verify", url, "--quarantine").sentence
    assert not files[1].exists()
    assert quire("store", "verify", url).code == 0


def test_clearing_a_store_asks_first(quire, tmp_path, monkeypatch):
    files = stock(tmp_path / "s", 3)
    url = (tmp_path / "s").as_uri()
    monkeypatch.setattr("typer.confirm", lambda text, **_: refuse(text))

    def refuse(text: str) -> None:
        assert text == f"Remove 3 pages from {url}?"
        raise SystemExit(1)

    assert quire("store", "clear", url).code == 1
    assert all(path.exists() for path in files)
    assert "give --yes" in quire("store", "clear", url, "--json").sentence
    assert quire("store", "clear", url, "--yes", "--json").json["num_removed"] == 3
    assert not any(path.exists() for path in files)


def test_clearing_several_stores_leaves_those_alone_that_are_only_read(quire, tmp_path):
    """Another cluster's: nobody would get those pages back."""
    mine, theirs = stock(tmp_path / "mine", 3), stock(tmp_path / "theirs", 2)
    urls = f"{(tmp_path / 'mine').as_uri()} {(tmp_path / 'theirs').as_uri()}?write=never"
    ran = quire("store", "clear", urls, "--yes", "--json")
    assert not any(path.exists() for path in mine)
    assert all(path.exists() for path in theirs)
    assert ran.json["num_removed"] == 3
    assert ran.json["left_alone"] == [f"{(tmp_path / 'theirs').as_uri()}?write=never"]
    assert "is only read and was left alone" in ran.sentence


# ---- what a person can get wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("/var/cache/quire", "write scheme://"),
        ("fil:///tmp/x", "known schemes are"),
        ("file:///tmp/x?mx=20GiB", "valid options are"),
        ("file:///tmp/x?max=lots", "such as 20GiB"),
        ("faulty://x", "write faulty+SCHEME://"),
    ],
)
@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_a_wrong_url_is_one_sentence_with_the_fix(command, url, fix, quire):
    ran = quire("store", command, url)
    assert ran.code == 2
    assert fix in ran.sentence
    assert ran.out == ""


def test_a_directory_that_is_not_there_is_not_made(quire, tmp_path):
    ran = quire("store", "verify", f"file://{tmp_path}/none")
    assert (ran.code, ran.out) == (2, "")
    assert "there is no store" in ran.sentence
    assert "check the path" in ran.sentence
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_somebody_else_is_left_alone(quire, tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    assert "there is no store" in quire("store", "clear", tmp_path.as_uri(), "--yes").sentence
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_directory_that_cannot_be_written_is_one_sentence(quire, tmp_path):
    (tmp_path / "file").write_text("in the way")
    ran = quire("demo", "--directory", tmp_path / "file")
    assert ran.code == 2
    assert "give --directory a directory that this user can write to" in ran.sentence
    ran = quire("bench", "store", tmp_path / "file", "--total", "4MiB", "--page", "1MiB")
    assert ran.code == 2
    assert "file' is a file, not a directory: give a directory" in ran.sentence
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_host_size_beyond_the_machine_is_one_sentence(quire, tmp_path):
    ran = quire("demo", "--host-memory", "4000TiB", "--directory", tmp_path)
    assert ran.code == 2
    assert re.search(
        r"asks for .* but .* can be used .*: set --host-memory to at most", ran.sentence
    )
    assert list(tmp_path.iterdir()) == []
    assert "at least" in quire("demo", "--host-memory", "1MiB").sentence
    assert "such as 20GiB" in quire("demo", "--host-memory", "big").sentence


def test_contradictory_options_are_one_sentence(quire):
    ran = quire("sim", "run", "--host-pages", "0", "--write-policy", "write_back", "--steps", "1")
    assert ran.code == 2
    assert "write_back needs a host tier: give host_pages or drop write.policy" in ran.sentence
    ran = quire("bench", "store", "--page", "1000", "--total", "4MiB")
    assert "a multiple of 4 KiB" in ran.sentence
    assert "less than one page" in quire("bench", "store", "--total", "1MiB").sentence


def test_an_unknown_device_or_shape_is_one_sentence(quire):
    assert "use cpu, cuda or cuda:N" in quire("bench", "transfer", "--device", "abacus").sentence
    assert "use --device cpu" in quire("bench", "transfer", "--device", "cuda:99").sentence
    assert "use llama-3.1-8b or" in quire("bench", "transfer", "--shape", "gpt-9").sentence


def test_a_page_of_another_version_is_named_and_kept(quire, tmp_path):
    import xxhash

    files = stock(tmp_path / "s", 2)
    data = bytearray(files[0].read_bytes())
    struct.pack_into("<I", data, 8, 99)
    data[HEADER_BYTES - 16 : HEADER_BYTES] = xxhash.xxh3_128_digest(data[: HEADER_BYTES - 16])
    files[0].write_bytes(data)
    ran = quire("store", "verify", (tmp_path / "s").as_uri(), "--quarantine")
    assert ran.code == 1
    assert "1 page of another version of Quire left alone" in ran.sentence
    assert "use the version that wrote them" in ran.sentence
    assert files[0].read_bytes() == data


def test_pages_of_another_model_are_named_and_kept(quire, tmp_path):
    other = dataclasses.replace(PART, fingerprint=b"g" * 32)
    files = stock(tmp_path / "s", 2) + stock(tmp_path / "s", 3, other, first=2)
    before = [path.read_bytes() for path in files]
    ran = quire("store", "verify", (tmp_path / "s").as_uri(), "--quarantine")
    assert ran.code == 0
    assert "2 models or layouts share this store" in ran.sentence
    assert "each reads only its own pages" in ran.sentence
    assert [path.read_bytes() for path in files] == before


def test_a_store_of_another_format_is_refused_and_kept(quire, tmp_path):
    files = stock(tmp_path / "s", 2)
    (tmp_path / "s" / "quire-store.json").write_text('{"quire_store": 99}')
    ran = quire("store", "clear", (tmp_path / "s").as_uri(), "--yes")
    assert ran.code == 2
    assert "use the Quire that wrote it" in ran.sentence
    assert all(path.exists() for path in files)


# ---- sim ----------------------------------------------------------------------------------------


def test_a_simulation_prints_a_table_or_an_object(quire):
    table = quire("sim", "run", "--seed", "3", "--steps", "60", "--no-lose-rank")
    assert table.code == 0
    assert "no rule was broken" in table.out
    first, again = (quire("sim", "run", "--seed", 3, "--steps", 60, "--json") for _ in range(2))
    assert first.out == again.out
    assert first.err == ""
    assert first.json["ok"] is True
    assert first.json["options"]["write_policy"] == SimOptions.from_seed(3).write_policy.value


def test_a_failing_simulation_prints_the_command_that_repeats_it(quire, monkeypatch):
    def fail(seed, steps, options, progress):
        raise SimulationError(f"a rule broke\n  repeat: {options.command(seed, steps)}")

    monkeypatch.setattr(cli_sim, "simulate", fail)
    wanted = [f"--{word}" for word in ("seed 5", "steps 70", "ranks 3", "no-events")]
    options = [part for text in wanted for part in text.split()]
    ran = quire("sim", "run", *options)
    assert ran.code == 1
    repeat = replace(SimOptions.from_seed(5), ranks=3, events=False).command(5, 70)
    assert f"repeat: {repeat}" in ran.err
    assert quire("sim", "run", *options, "--json").json["repeat"] == repeat


def test_every_option_of_the_simulator_can_be_given(quire):
    """The command that a failure prints must be one that the command line takes."""
    unusual = replace(SimOptions.from_seed(0), fault_rate=0.123, lose_rank=True, events=False)
    command = unusual.command(0, 9).split()
    assert command[:3] == ["quire", "sim", "run"]
    text = quire("sim", "run", "--help").out
    for field in fields(SimOptions):
        assert f"--{field.name.replace('_', '-')}" in text
    ran = quire(*command[1:], "--json")
    assert ran.json["digest"] == simulate(0, 9, unusual).digest


# ---- bench and demo -----------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["quire", "quire.cli"])
def test_a_module_is_the_command_where_that_is_not_on_the_path(module):
    ran = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert __version__ in ran.stdout


def test_bench_core_prints_its_table_or_its_object(quire, monkeypatch):
    row = {"us_per_request": 12.5, "us_per_request_no_store": 9.5}
    row |= {"requests": 16000, "hit_rate": 0.5}
    result = {"chat": row, "longdoc": row}
    monkeypatch.setattr(bench_core, "run", lambda **_: result)
    table = quire("bench", "core").out
    for figure in ("12.5", "9.5", "50.0%"):
        assert figure in table
    assert quire("bench", "core", "--json").json == result


def test_bench_transfer_on_a_small_case(quire):
    small = ["--shape", "smollm2-135m", "--page-size", "16", "--pages", "2", "--repeats", "1"]
    result = quire("bench", "transfer", *small, "--json").json
    assert result["ok"] is True
    assert len(result["cases"]) == 4


def test_a_wrong_copy_is_shown_as_wrong(quire, monkeypatch):
    from rich.console import Console

    case = {"shape": "s", "dtype": "d", "page_size": 16, "inner": "nhd", "direction": "load"}
    case |= {"size_bytes": 1024, "gb_per_s": 1.0, "plain_gb_per_s": 2.0, "ratio": 0.5}
    case |= {"correct": False}
    console = Console(width=120)
    with console.capture() as captured:
        for item in report.transfer({"device": "cpu", "ok": False, "cases": [case]}):
            console.print(item)
    assert "NO" in captured.get()
    assert "wrong or too late" in captured.get()


def test_bench_store_on_a_small_case_leaves_nothing_behind(quire, tmp_path, monkeypatch):
    monkeypatch.setattr("quire.bench.anystore.SPARE_BYTES", 0)  # the free space it insists on
    options = ["--total", "4MiB", "--page", "1MiB", "--page", "2MiB", "--rounds", "1"]
    ran = quire("bench", "store", tmp_path, *options)
    assert ran.code == 0
    assert "1 MiB" in ran.out
    pages = quire("bench", "store", tmp_path, *options, "--json").json["pages"]
    assert [each["page_bytes"] for each in pages] == [1 << 20, 2 << 20]
    assert all(each["read"]["ratio"] > 0 for each in pages)
    assert list(tmp_path.iterdir()) == []


def test_the_demo_shows_every_tier_and_leaves_nothing_behind(quire, tmp_path):
    served = quire("demo", "--json", "--directory", tmp_path).json["served"]
    tiers = [(row["device"], row["host"], row["store"], row["computed"]) for row in served]
    assert tiers == [
        (0, 0, 0, 64),
        (64, 0, 0, 0),
        (32, 0, 0, 32),
        (0, 64, 0, 0),
        (0, 0, 64, 0),
        (0, 0, 64, 0),
        (0, 0, 40, 24),
        (0, 0, 64, 0),
    ]
    assert all(row["checked"] == 64 for row in served)
    assert list(tmp_path.iterdir()) == []
