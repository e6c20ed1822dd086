"""`quire replay` and `quire profile`: what a person sees, right or wrong."""

import json

import pytest

from quire.replay.profile import Profile
from quire.settings import OPTIONS
from unit.cli_support import command

PROFILE = Profile(
    model="m",
    device="cpu",
    dtype="float32",
    bytes_per_token=1 << 10,
    fixed_s=0.01,
    s_per_token=1e-4,
    s_per_pair=1e-9,
    host_bytes_per_s=1e10,
    store_bytes_per_s=1e9,
    longest_tokens=4096,
)


@pytest.fixture
def quire(capsys, monkeypatch, tmp_path):
    for option in OPTIONS.values():
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    return command(capsys, monkeypatch)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [
        {
            "timestamp": 10 * i,
            "input_length": 2048,
            "output_length": 5,
            "hash_ids": [1, 2, i % 9, i],
        }
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_trace_is_replayed_at_five_sizes(quire, trace, tmp_path):
    ran = quire("replay", trace, "--device", "2GiB", "--host", "1GiB", "--plot", tmp_path / "p.png")
    assert ran.code == 0
    assert "40 requests" in ran.out
    assert "256.0 MiB" in ran.out or "256 MiB" in ran.out
    assert "measure a machine first: quire profile" in ran.out
    assert (tmp_path / "p.png").exists()


def test_as_json_with_the_profile_that_is_there(quire, trace, tmp_path):
    PROFILE.write(tmp_path / "cache" / "profile.json")
    ran = quire("replay", trace, "--device", "32MiB", "--host", "4MiB", "--json")
    assert ran.err == ""
    assert ran.json["page_bytes"] == 512 << 10
    assert len(ran.json["points"]) == 5
    assert ran.json["points"][0]["ttft_s"]["mean"] > 0
    sized = quire(
        "replay",
        trace,
        "--device",
        "64MiB",
        "--host",
        "8MiB",
        "--bytes-per-token",
        "2KiB",
        "--json",
    )
    assert sized.json["page_bytes"] == 1 << 20


def test_made_up_chats(quire):
    ran = quire("replay", "--groups", "3", "--limit", "50", "--sizes", "2GiB,4GiB", "--json")
    assert ran.json["trace"]["name"] == "3 system prompts"
    assert [point["bytes"] for point in ran.json["points"]] == [2 << 30, 4 << 30]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "give a trace, or --groups"),
        (["none.jsonl", "--groups", "2"], "one of the two"),
        (["none.jsonl"], "cannot be read"),
        (["--groups", "2", "--host", "1KiB"], "one block of tokens needs 64 MiB"),
        (["--groups", "2", "--vary", "store"], "needs a size: give --store or --sizes"),
        (["--groups", "2", "--profile", "none.json"], "make one with quire profile"),
        (["--groups", "2", "--host", "lots"], "is not a size"),
        (["--groups", "2", "--plot", "none/p.png"], "in a directory that exists"),
        (["--groups", "2", "--plot", "p.txt"], "name a .png"),
        (["--groups", "2", "--device", "64MiB"], "the longest request needs"),
    ],
)
def test_what_was_asked_wrongly_is_one_sentence(quire, arguments, wanted):
    ran = quire("replay", *arguments)
    assert ran.code == 2
    assert wanted in ran.sentence


def test_a_profile_is_measured_and_kept(quire, monkeypatch, tmp_path):
    got = {}

    async def measure(config, progress):
        got["config"] = config
        return PROFILE

    monkeypatch.setattr("quire.replay.measure.measure", measure)
    monkeypatch.setattr("quire.models.resolve", lambda model, progress: tmp_path)
    ran = quire("profile", "--device", "cpu")
    assert ran.code == 0
    assert "first token of a prompt on the device" in ran.out
    assert got["config"].store.startswith(f"file://{tmp_path}/cache/profile-")  # not the user's own
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["profile.json"]
    assert quire("profile", "--json", "--output", tmp_path / "p").json["model"] == "m"
