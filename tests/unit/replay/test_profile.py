"""From measured times to a profile, and from a profile to times."""

import asyncio

import pytest

from quire.engine.config import EngineConfig
from quire.errors import ConfigError
from quire.replay.measure import measure, profile_of
from quire.replay.profile import Profile, read_profile

LENGTHS = [1000, 2000, 3000]
BYTES = 1000


def times(num_tokens: int) -> dict[str, float]:
    """Of a machine that is known."""
    device = 0.01
    host = device + num_tokens * BYTES / 1e9
    return {
        "computed": 0.01 + num_tokens * 1e-4 + num_tokens * num_tokens / 2 * 1e-8,
        "device": device,
        "host": host,
        "store": host + 0.5 + num_tokens * BYTES / 1e8,
    }


@pytest.fixture
def profile() -> Profile:
    return profile_of("m", ("cpu", "float32"), BYTES, LENGTHS, [times(n) for n in LENGTHS])


def test_the_machine_is_found_again_in_its_times(profile):
    assert profile.s_per_token == pytest.approx(1e-4)
    assert profile.s_per_pair == pytest.approx(1e-8)
    assert profile.host_bytes_per_s == pytest.approx(1e9)
    assert profile.store_bytes_per_s == pytest.approx(1e8)
    assert profile.ttft_s(2000, 0, 0, 0) == pytest.approx(times(2000)["computed"])


def test_noise_makes_no_negative_rate():
    noisy = [{"computed": 0.5, "device": 0.2, "host": 0.1, "store": 0.05} for _ in LENGTHS]
    found = profile_of("m", ("cpu", "float32"), BYTES, LENGTHS, noisy)
    assert found.s_per_token > 0
    assert found.s_per_pair >= 0
    assert found.host_bytes_per_s > 0
    assert found.store_bytes_per_s > 0


def test_a_hit_saves_what_it_does_not_have_to_compute(profile):
    computed = profile.ttft_s(3000, 0, 0, 0)
    store = profile.ttft_s(3000, 0, 0, 2900)
    host = profile.ttft_s(3000, 0, 2900, 0)
    device = profile.ttft_s(3000, 2900, 0, 0)
    assert device <= host < store < computed
    assert profile.ttft_s(3000, 3000, 0, 0) > 0


def test_it_is_kept_and_read_again(profile, tmp_path):
    profile.write(tmp_path / "a" / "p.json")
    assert read_profile(tmp_path / "a" / "p.json") == profile


def test_a_profile_needs_all_tiers():
    config = EngineConfig(model="/nowhere", name="m", device_bytes=1, host_bytes=1)
    with pytest.raises(ConfigError, match="store is none"):
        asyncio.run(measure(config))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": 1}'])
def test_what_is_no_profile_is_one_sentence(tmp_path, text):
    (tmp_path / "p").write_text(text)
    with pytest.raises(ConfigError, match="make one with quire profile"):
        read_profile(tmp_path / "p")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "none")
