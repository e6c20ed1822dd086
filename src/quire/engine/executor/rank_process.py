"""A rank in a process of its own, `python -m quire.engine.executor.rank_process`.

A worker process that also runs its share of the model: parcels are batches.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from quire.decoders import msgpack_decoder
from quire.engine.batch import decode_batch, encode
from quire.engine.executor.rank import RankConfig, build_rank
from quire.engine.selfcheck import check_resume
from quire.errors import ModelError
from quire.worker.process import Handler, main
from quire.worker.wire import Startup

if TYPE_CHECKING:
    from quire.worker.worker import CacheWorker


def start(startup: Startup) -> tuple[CacheWorker, Handler]:
    config = msgpack_decoder(RankConfig).decode(startup.extra)
    rank = build_rank(config, startup.config)
    if problem := check_resume(rank):
        rank.close()
        raise ModelError(f"{problem}: run it with --tp 1, without reuse")

    def run(data: bytes) -> bytes:
        return encode(rank.runner.run(decode_batch(data)))

    return rank.worker, run


if __name__ == "__main__":
    sys.exit(main(start))
