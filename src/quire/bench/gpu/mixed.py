"""Mixed batches: a prompt is computed in chunks while others decode. What do they feel of it?

A step computes a chunk and a token of each. Of the time until the prompt's first token, what the
others' tokens would have taken alone is theirs; the rest is the prompt's. It should be no more than
the prompt takes alone.
"""

from __future__ import annotations

import statistics

from quire.bench.gpu.driving import Drive
from quire.bench.gpu.rig import Result, Rig
from quire.bench.gpu.times import GREEDY, longest
from quire.types import Tier

_REPEATS = 3


def measure(rig: Rig, drive: Drive) -> list[Result]:
    return [_row(rig, one, chunk) for chunk, one in rig.by_chunk(drive)]


def _row(rig: Rig, drive: Drive, chunk: int) -> Result:
    batch, context, tokens = rig.plan.mixed
    rig.progress(f"a prompt in chunks of {chunk} beside others", 0, 1)
    own = []
    for _ in range(_REPEATS):
        own.append(drive.first_token_s(rig.prompt(tokens))[0])
        drive.forget(Tier.DEVICE, Tier.HOST)
    own_ms = statistics.median(own) * 1e3
    prompts = [rig.prompt(context) for _ in range(batch)]
    with drive.decoding(prompts, longest(GREEDY, drive, context)) as decoding:
        alone = [decoding.gap_ms(rig.plan.decode_tokens)]
        beside = [decoding.gaps_beside(rig.prompt(tokens)) for _ in range(_REPEATS)]
        alone.append(decoding.gap_ms(rig.plan.decode_tokens))
    drive.forget(Tier.DEVICE, Tier.HOST)
    alone_ms = statistics.mean(alone)  # the context grows meanwhile
    added_ms = statistics.median(sum(gaps) - len(gaps) * alone_ms for gaps in beside)
    return {
        "batch": batch,
        "context": context,
        "tokens": tokens,
        "chunk": chunk,
        "alone_ms": alone_ms,
        "own_ms": own_ms,
        "slowest_ms": statistics.median(max(gaps) for gaps in beside),
        "added_ms": added_ms,
        "times_own": added_ms / own_ms,
    }
