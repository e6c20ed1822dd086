"""What a metric of a server or a router is: a Spec in a list, from which instruments, exposition
and reference are made.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricKind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


class Spec(NamedTuple):
    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Instruments:
    """Those of one list, in a registry of their own: no globals."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self.registry = CollectorRegistry()

    def counter(self, name: str) -> Counter:
        spec = self._specs[name]
        return Counter(name, spec.help, spec.labels, registry=self.registry)

    def gauge(self, name: str) -> Gauge:
        spec = self._specs[name]
        return Gauge(name, spec.help, spec.labels, registry=self.registry)

    def histogram(self, name: str) -> Histogram:
        spec = self._specs[name]
        return Histogram(name, spec.help, spec.labels, registry=self.registry, buckets=spec.buckets)

    def exposition(self) -> bytes:
        return generate_latest(_Listed(self.registry))


class _Listed(CollectorRegistry):
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
