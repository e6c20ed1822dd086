"""Decoding, prompts and hits, one at a time, each beside its floor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from quire.bench import Result
from quire.bench.gpu import crossover
from quire.bench.gpu.driving import Drive
from quire.bench.gpu.rig import Rig
from quire.engine.messages import SamplingParams
from quire.types import Tier

GREEDY = SamplingParams(max_tokens=1, temperature=0)
_DRAWN = SamplingParams(
    max_tokens=1, temperature=0.8, top_p=0.95, presence_penalty=0.5, frequency_penalty=0.1
)
_REPEATS = 3
_GONE: dict[str, tuple[Tier, ...]] = {
    "device": (),
    "host": (Tier.DEVICE,),
    "store": (Tier.DEVICE, Tier.HOST),
}
"""From where a prompt is gone, for it to be found there."""


def decode(rig: Rig, drive: Drive) -> list[Result]:
    rows = []
    for i, (batch, context) in enumerate(rig.plan.decode):
        rig.progress("decoding", i, len(rig.plan.decode))
        floor_ms = rig.needs.decode_s(rig.machine, batch, context) * 1e3
        row: Result = {"batch": batch, "context": context, "floor_ms": floor_ms}
        prompts = [rig.prompt(context) for _ in range(batch)]
        for name, options in (("greedy_ms", GREEDY), ("drawn_ms", _DRAWN)):
            row[name] = drive.decode_ms(
                prompts, longest(options, drive, context), rig.plan.decode_tokens
            )
        drive.forget(Tier.DEVICE, Tier.HOST)
        row["share_of_floor"] = floor_ms / row["greedy_ms"]
        rows.append(row)
    return rows


def longest(params: SamplingParams, drive: Drive, context: int) -> SamplingParams:
    """An answer that does not end while it is measured."""
    return msgspec.structs.replace(params, max_tokens=drive.engine.info.max_context - context)


def prompts(rig: Rig, drive: Drive) -> list[Result]:
    return [row for chunk, one in rig.by_chunk(drive) for row in _prompts(rig, one, chunk)]


def _prompts(rig: Rig, drive: Drive, chunk: int) -> list[Result]:
    rows, lengths = [], [tokens for tokens, other in rig.plan.prompts if other == chunk]
    for i, tokens in enumerate(lengths):
        rig.progress(f"prompts in chunks of {chunk}", i, len(lengths))
        seconds = []
        for _ in range(_REPEATS):
            seconds.append(drive.first_token_s(rig.prompt(tokens))[0])
            drive.forget(Tier.DEVICE, Tier.HOST)
        took, ops = statistics.median(seconds), rig.needs.prompt_ops(tokens)
        rows.append(
            {
                "tokens": tokens,
                "chunk": chunk,
                "ms": took * 1e3,
                "floor_ms": ops / rig.machine.matmul_ops_s * 1e3,
                "tflops": ops / took / 1e12,
                "share_of_floor": ops / rig.machine.matmul_ops_s / took,
            }
        )
    return rows


def crossing(rig: Rig, drive: Drive) -> Result:
    """Computing, fetching, both, and what the cost model chooses."""
    plan = rig.plan
    return crossover.measure(
        drive,
        rig.prompt(plan.crossover_tokens),
        rig.new_folder(),
        ratios=plan.crossover_ratios,
        repeats=plan.crossover_repeats,
        progress=lambda done, of: rig.progress("crossover", done, of),
    )


def hits(rig: Rig, drive: Drive) -> list[Result]:
    """What the host cannot hold comes first, without a store: that would hold it up, and have half
    of it."""
    most = drive.engine.info.max_context - rig.plan.more_tokens
    lengths = [tokens for tokens in rig.plan.hits if tokens < most]
    held = [tokens for tokens in lengths if tokens * rig.needs.kv_bytes < rig.plan.host_bytes]
    rows = [_hit(rig, drive, tokens, ("device",)) for tokens in lengths if tokens not in held]
    rig.progress("what the disk does", 0, 1)
    disk_bytes_s = rig.disk_bytes_s()
    rig.attach(drive)
    for tokens in held:
        row = _hit(rig, drive, tokens, tuple(_GONE))
        if disk_bytes_s is not None:
            rate = min(disk_bytes_s, rig.machine.link_bytes_s)
            read_s = tokens * rig.needs.kv_bytes / rate
            row["store_floor_ms"] = (rig.needs.decode_s(rig.machine, 1, 0) + read_s) * 1e3
        rows.append(row)
    rig.detach(drive)
    return sorted(rows, key=lambda row: int(row["tokens"]))


def _hit(rig: Rig, drive: Drive, tokens: int, tiers: Sequence[str]) -> Result:
    rig.progress(f"hits of {tokens:,}", 0, 1)
    prompt = rig.prompt(tokens)
    computed_s, _ = drive.first_token_s(prompt)
    link_s = tokens * rig.needs.kv_bytes / rig.machine.link_bytes_s
    row: Result = {
        "tokens": tokens,
        "more_tokens": rig.plan.more_tokens,
        "computed_ms": computed_s * 1e3,
        "floor_ms": (rig.needs.decode_s(rig.machine, 1, 0) + link_s) * 1e3,
    }
    for tier in tiers:
        seconds = []
        for _ in range(_REPEATS):
            drive.forget(*_GONE[tier])
            took, cached = drive.first_token_s(prompt)
            seconds.append(took)
            row[f"{tier}_tokens"] = getattr(cached, tier)
        row[f"{tier}_ms"] = statistics.median(seconds) * 1e3
    row["more_ms"] = statistics.median(
        drive.first_token_s(np.concatenate((prompt, rig.prompt(rig.plan.more_tokens))))[0] * 1e3
        for _ in range(_REPEATS)
    )
    drive.forget(Tier.DEVICE, Tier.HOST)
    return row
