"""Executors: `open_executor` puts one rank into this process, several into their own."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.executor.base import Executor, RankLost
from quire.engine.executor.rank import Model, RankConfig
from quire.progress import Share
from quire.worker import WorkerConfig

__all__ = ["Executor", "Model", "RankConfig", "RankLost", "open_executor"]


def open_executor(
    config: RankConfig,
    worker_configs: Sequence[WorkerConfig],
    progress: Share | None = None,
    model: Model | None = None,
) -> Executor:
    """`model`: of the only rank, if it is loaded already. Raises ModelError, ConfigError,
    MemoryBudgetError, WorkerError; nothing is left then."""
    if len(worker_configs) == 1:
        from quire.engine.executor.local import LocalExecutor
        from quire.engine.executor.rank import build_rank

        overlaps = worker_configs[0].device != "cpu" if config.overlap is None else config.overlap
        rank = build_rank(config, worker_configs[0], progress, model)
        return LocalExecutor(rank, overlaps=overlaps)
    from quire.engine.executor.ranks import RankExecutor

    return RankExecutor(config, worker_configs)
