"""Profile: how fast one machine computes, loads and fetches, and what a first token takes there.

    fetch from the store ──▶ load from the host ┐
                             compute the rest   ┴─▶ first token

Loading and computing go on at the same time, layer by layer; fetching comes before both. Queueing
is not in it: it is the time of a request that is alone. Measured by measure.py, kept as JSON.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from quire.decoders import json_decoder
from quire.errors import ConfigError


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    device: str
    dtype: str
    bytes_per_token: int
    """Of KV cache."""
    fixed_s: float
    """Of a prompt that is on the device already."""
    s_per_token: float
    s_per_pair: float
    """For each pair of a computed token and one before it: attention."""
    host_bytes_per_s: float
    store_bytes_per_s: float
    longest_tokens: int
    """Of the prompts it was measured with: beyond, it is a guess."""

    def ttft_s(self, num_tokens: int, device: int, host: int, store: int) -> float:
        """Of a prompt of which so many tokens were found in each tier."""
        reused = device + host + store
        computed = max(num_tokens - reused, 1)
        compute_s = computed * self.s_per_token
        compute_s += computed * (reused + computed / 2) * self.s_per_pair
        load_s = (host + store) * self.bytes_per_token / self.host_bytes_per_s
        fetch_s = store * self.bytes_per_token / self.store_bytes_per_s
        return self.fixed_s + fetch_s + max(load_s, compute_s)

    def write(self, path: Path) -> None:
        """Raises ConfigError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        except OSError as error:
            raise ConfigError(
                f"the profile cannot be written to {str(path)!r}: {error.strerror}"
            ) from error


def read_profile(path: Path) -> Profile:
    """Raises ConfigError."""
    try:
        found = json_decoder(Profile).decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"the profile {str(path)!r} cannot be read ({error.strerror}): make one with "
            "quire profile"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{str(path)!r} is no profile ({error}): make one with quire profile"
        ) from error
    if min(found.bytes_per_token, found.host_bytes_per_s, found.store_bytes_per_s) <= 0:
        raise ConfigError(f"{str(path)!r} holds a rate of 0: make it again with quire profile")
    return found
