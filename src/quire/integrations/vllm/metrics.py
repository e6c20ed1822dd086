"""What Quire counts, in vLLM's metrics: one Prometheus counter, by event. Knows vLLM.

quire_cache_total{event="loaded_pages", model_name=…, engine=…}
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)


class QuireStats(KVConnectorStats):
    """Counts since the last ones, by event."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> QuireStats:
        return QuireStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class QuirePromMetrics(KVConnectorPromMetrics):
    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counter = self._counter_cls(
            name="quire_cache",
            documentation="What happened in Quire's tiers, in pages unless the event says more.",
            labelnames=[*labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for event, count in transfer_stats_data.items():
            self._counter.labels(*values, event).inc(count)
