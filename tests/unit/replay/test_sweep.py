"""What a person is told: the figures at each size, what the next GiB is worth, and when it is
enough."""

import io

import pytest
from rich.console import Console

from quire.errors import ConfigError
from quire.replay import plot, report
from quire.replay.profile import Profile
from quire.replay.run import ReplayOptions
from quire.replay.sweep import SizedTier, sweep
from quire.replay.synthetic import Chats, chats

PAGE_BYTES = 64 << 20
BASE = ReplayOptions(device_pages=100, host_pages=100)
PROFILE = Profile(
    model="m",
    device="cpu",
    dtype="float32",
    bytes_per_token=128 << 10,
    fixed_s=0.01,
    s_per_token=1e-4,
    s_per_pair=1e-9,
    host_bytes_per_s=1e10,
    store_bytes_per_s=1e9,
    longest_tokens=4096,
)


@pytest.fixture(scope="module")
def trace():
    return chats(Chats(groups=4, requests=400, active=30))


@pytest.fixture(scope="module")
def result(trace):
    sizes = (50, 200, 800, 1600)
    return sweep(trace, BASE, sizes, tier=SizedTier.HOST, page_bytes=PAGE_BYTES, profile=PROFILE)


def shown(result) -> str:
    out = io.StringIO()
    console = Console(width=160, file=out)
    for item in report.tables(result):
        console.print(item)
    return out.getvalue()


def test_a_traces_name_is_shown_as_it_is(result):
    text = shown({**result, "trace": {**result["trace"], "name": "day[/1].jsonl"}})
    assert "day[/1].jsonl: " in text


def test_more_memory_finds_more_and_answers_sooner(result):
    points = result["points"]
    hits = [each["hit"] for each in points]
    assert hits == sorted(hits)
    times = [each["ttft_s"]["mean"] for each in points]
    assert times == sorted(times, reverse=True)
    for each in points:
        assert each["hit"] == pytest.approx(sum(each["hit_by_tier"].values()))
        assert each["ideal_lru"] <= each["belady"] <= result["unlimited"] + 1e-9
        assert each["of_ideal"] == pytest.approx(each["hit"] / each["ideal_lru"])
    assert points[-1]["hit"] == pytest.approx(result["unlimited"])


def test_the_next_gib_is_what_lies_between_two_sizes(result):
    first, second, *_, last = result["points"]
    gib = (second["bytes"] - first["bytes"]) / (1 << 30)
    assert first["next_gib"]["hit"] == pytest.approx((second["hit"] - first["hit"]) / gib)
    assert first["next_gib"]["saved_s"] > 0
    assert last["next_gib"] is None


def test_enough_is_the_smallest_size_that_finds_nearly_all(result):
    enough = next(each for each in result["points"] if each["bytes"] == result["enough_bytes"])
    assert enough["hit"] >= 0.95 * result["points"][-1]["hit"]
    text = shown(result)
    assert result["advice"] in text.replace("\n", " ")
    for word in ("ideal LRU", "Belady", "TTFT", "next GiB", "400 requests", "are extrapolated"):
        assert word in text


def test_without_a_profile_no_time_is_made_up(trace, tmp_path):
    found = sweep(trace, BASE, (50, 100), tier=SizedTier.HOST, page_bytes=PAGE_BYTES, profile=None)
    assert "TTFT" not in shown(found)
    assert "quire profile" in shown(found)
    plot.write(found, tmp_path / "p.png")


@pytest.mark.parametrize("tier", list(SizedTier))
def test_any_tier_may_be_varied(trace, tier):
    base = ReplayOptions(device_pages=100, host_pages=50, store_pages=50)
    found = sweep(trace, base, (60, 400), tier=tier, page_bytes=PAGE_BYTES, profile=None)
    small, large = found["points"]
    assert large["hit"] > small["hit"]
    assert large["hit_by_tier"][tier.value] > small["hit_by_tier"][tier.value]


def test_a_device_smaller_than_a_request_is_one_sentence(trace):
    with pytest.raises(ConfigError, match="the longest request needs"):
        sweep(trace, BASE, (5,), tier=SizedTier.DEVICE, page_bytes=PAGE_BYTES, profile=None)


def test_it_can_be_drawn(result, tmp_path):
    plot.write(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write"):
        plot.write(result, tmp_path / "none" / "p.png")
