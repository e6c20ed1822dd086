"""What a metric of a server or a router is: a Spec in a list, from which instruments, exposition
and reference are made.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Spec(NamedTuple):
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Listed(CollectorRegistry):
    """A registry's metrics without the `_created` series that the library adds to each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._listed = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._listed.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


def reference(metrics: Iterable[Spec]) -> str:
    """Every metric, as a Markdown table."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for spec in metrics:
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "–"
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows) + "\n"
