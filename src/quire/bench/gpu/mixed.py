"""Mixed batches: a prompt is computed in chunks while others decode. What do they feel of it?

A step computes a chunk and a token of each. The slowest token should come later by no more than
the slowest chunk, the last one, takes alone. Beside it, over all of them: of the time until the
prompt's first token, what the others' tokens would have taken alone is theirs; the rest is what the
prompt adds, about as much as it takes alone.
"""

from __future__ import annotations

import statistics

from quire.bench import Result
from quire.bench.gpu.driving import Drive
from quire.bench.gpu.rig import Rig
from quire.bench.gpu.times import GREEDY, longest
from quire.types import Tier

_REPEATS = 3


def measure(rig: Rig, drive: Drive) -> list[Result]:
    return [_row(rig, one, chunk) for chunk, one in rig.by_chunk(drive)]


def _row(rig: Rig, drive: Drive, chunk: int) -> Result:
    batch, context, tokens = rig.plan.mixed
    rig.progress(f"a prompt in chunks of {chunk} beside others", 0, 1)
    own_ms = _alone_ms(rig, drive, tokens)
    last_ms = own_ms - (_alone_ms(rig, drive, tokens - chunk) if tokens > chunk else 0)
    prompts = [rig.prompt(context) for _ in range(batch)]
    with drive.decoding(prompts, longest(GREEDY, drive, context)) as decoding:
        alone = [decoding.gap_ms(rig.plan.decode_tokens)]
        beside = [decoding.gaps_beside(rig.prompt(tokens)) for _ in range(_REPEATS)]
        alone.append(decoding.gap_ms(rig.plan.decode_tokens))
    drive.forget(Tier.DEVICE, Tier.HOST)
    alone_ms = statistics.mean(alone)  # the context grows meanwhile
    added_ms = statistics.median(sum(gaps) - len(gaps) * alone_ms for gaps in beside)
    slowest_ms = statistics.median(max(gaps) for gaps in beside)
    return {
        "batch": batch,
        "context": context,
        "tokens": tokens,
        "chunk": chunk,
        "alone_ms": alone_ms,
        "own_ms": own_ms,
        "last_chunk_ms": last_ms,
        "slowest_ms": slowest_ms,
        "times_chunk": (slowest_ms - alone_ms) / last_ms,
        "added_ms": added_ms,
        "times_own": added_ms / own_ms,
    }


def _alone_ms(rig: Rig, drive: Drive, tokens: int) -> float:
    """Until the first token of a prompt of so many, when there is nobody else."""
    seconds = []
    for _ in range(_REPEATS):
        seconds.append(drive.first_token_s(rig.prompt(tokens))[0])
        drive.forget(Tier.DEVICE, Tier.HOST)
    return statistics.median(seconds) * 1e3
