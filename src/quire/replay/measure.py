"""measure(): a Profile of this machine, from a real engine that is asked the same prompt again and
again while its tiers are emptied one after the other.

    new prompt                         computed
    again                              on the device     the floor
    again, the device flushed          from the host
    again, device and host flushed     from the store

Every time is that of a first token as a client sees it, and hits are checked to have come from
where they should. An engine that would rather compute than fetch does so here too: then a hit in
the store is worth as much as none, which is what its times say. Medians; the rates are slopes
between short and long prompts, so that what every request costs is not in them.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from quire.config import PrefetchPolicy
from quire.engine.client import EngineClient
from quire.engine.config import EngineConfig
from quire.engine.messages import (
    CachedTokens,
    EngineStatus,
    Finish,
    Flush,
    Flushed,
    GetStatus,
    SamplingParams,
)
from quire.errors import ConfigError, EngineError
from quire.progress import Progress
from quire.replay.profile import Profile

_Times = dict[str, list[float]]
"""Tier → median seconds, by length."""

LENGTHS = 3
_SHORTEST, _LONGEST = 512, 4096
_LONGEST_S = 4.0
"""To be computed in: on a slow machine prompts are shorter."""
_REST_S = 60.0
_FASTEST = 1e12
"""Bytes per second, where a tier is too fast to be told from none."""


async def measure(
    config: EngineConfig, *, repeats: int = 3, progress: Progress = lambda *_: None
) -> Profile:
    """Raises ConfigError, EngineError, and what starting an engine raises."""
    if config.store is None:
        raise ConfigError("a profile is of all tiers, and store is none: give it a URL")
    waiting = msgspec.structs.replace(config, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    client = await EngineClient.start(waiting)
    try:
        info = client.info
        longest = min(await _longest(client), info.max_context * 3 // 4)
        lengths = [longest * (i + 1) // LENGTHS for i in range(LENGTHS)]
        samples = [await _sample(client, n, repeats, progress) for n in lengths]
        full = next(tier for tier in info.tiers if tier.component == "full")
        bytes_per_token = sum(
            tier.page_bytes for tier in info.tiers if tier.name == full.name and tier.page_bytes
        )
        return profile_of(
            info.name,
            (info.device, info.dtype),
            bytes_per_token // info.page_size,
            lengths,
            samples,
        )
    finally:
        await client.close()


def profile_of(
    model: str,
    where: tuple[str, str],
    bytes_per_token: int,
    lengths: Sequence[int],
    samples: Sequence[dict[str, float]],
) -> Profile:
    """`samples`: seconds by tier ("computed", "device", "host", "store"), one for each length."""
    times: _Times = {tier: [sample[tier] for sample in samples] for tier in samples[0]}
    fixed_s = min(times["device"])
    s_per_token, s_per_pair = _fit(lengths, [t - fixed_s for t in times["computed"]])
    size = (lengths[-1] - lengths[0]) * bytes_per_token
    return Profile(
        model=model,
        device=where[0],
        dtype=where[1],
        bytes_per_token=bytes_per_token,
        fixed_s=fixed_s,
        s_per_token=s_per_token,
        s_per_pair=s_per_pair,
        host_bytes_per_s=_rate(size, times["host"], times["device"]),
        store_bytes_per_s=_rate(size, times["store"], times["host"]),
        longest_tokens=lengths[-1],
    )


def _fit(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds per token and per pair; a line where the curve bends the wrong way."""
    n = np.array(lengths, dtype=float)
    target = np.maximum(np.array(seconds), 1e-9)
    both = np.stack([n, n * n / 2], axis=1)
    (per_token, per_pair), *_ = np.linalg.lstsq(both / target[:, None], np.ones(len(n)), rcond=None)
    if per_token <= 0 or per_pair < 0:
        per_token, per_pair = float(np.median(target / n)), 0.0
    return float(per_token), float(per_pair)


def _rate(size_bytes: int, slow: Sequence[float], fast: Sequence[float]) -> float:
    """Of the longest prompt over the shortest, beyond what they take one tier above."""
    seconds = (slow[-1] - fast[-1]) - (slow[0] - fast[0])
    return min(size_bytes / seconds, _FASTEST) if seconds > 0 else _FASTEST


async def _longest(client: EngineClient) -> int:
    """Tokens of a prompt that is worth its time here. Also warms up."""
    seconds = 0.0
    for _ in range(2):
        prompt = _prompt(client.info.vocab_size, _SHORTEST // 2)
        seconds, _ = await _ask(client, prompt, secrets.token_hex(8))
    return min(max(int(_LONGEST_S / seconds * len(prompt)), _SHORTEST), _LONGEST)


async def _sample(
    client: EngineClient, num_tokens: int, repeats: int, progress: Progress
) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    for repeat in range(repeats):
        progress(f"{num_tokens} tokens", repeat, repeats)
        prompt, salt = _prompt(client.info.vocab_size, num_tokens), secrets.token_hex(8)
        for tier, flushed in (
            ("computed", []),
            ("device", []),
            ("host", ["device"]),
            ("store", ["device", "host"]),
        ):
            await _at_rest(client)
            if flushed:
                await client.ask(Flush(flushed), Flushed)
            seconds, cached = await _ask(client, prompt, salt)
            _check(tier, cached, num_tokens)
            times.setdefault(tier, []).append(seconds)
    progress(f"{num_tokens} tokens", repeats, repeats)
    return {tier: statistics.median(found) for tier, found in times.items()}


def _check(tier: str, cached: CachedTokens, num_tokens: int) -> None:
    found = getattr(cached, tier, 0)
    if tier in ("device", "host") and found < num_tokens // 2:
        raise EngineError(
            f"only {found} of {num_tokens} tokens came from the {tier}: give it room for a prompt "
            "of that length"
        )


async def _ask(
    client: EngineClient, prompt: npt.NDArray[np.int32], salt: str
) -> tuple[float, CachedTokens]:
    cached, first_s = CachedTokens(), 0.0
    started = time.perf_counter()
    async with client.generate(
        prompt.tobytes(), SamplingParams(max_tokens=1), salt=salt
    ) as outputs:
        async for output in outputs:
            if output.finish not in (None, Finish.LENGTH, Finish.STOP):
                raise EngineError(output.error or "the engine did not answer")
            first_s = first_s or time.perf_counter() - started
            cached = output.cached or cached
    return first_s, cached


async def _at_rest(client: EngineClient) -> None:
    """Until nothing moves: what is being copied cannot be flushed."""
    async with asyncio.timeout(_REST_S):
        while any((await client.ask(GetStatus(), EngineStatus)).operations.values()):
            await asyncio.sleep(0.01)


def _prompt(vocab_size: int, num_tokens: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(num_tokens).integers(0, vocab_size, num_tokens, dtype="<i4")
