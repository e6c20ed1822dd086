"""What the router exposes to Prometheus. ROUTER_METRICS is the one list, as in the server's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.router.fleet import Fleet
from quire.web.metrics import Kind, Listed, Spec

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

ROUTER_METRICS = (
    Spec("quire_router_requests_total", Kind.COUNTER,
         "Requests answered, by endpoint and HTTP status; 499: the client went away first.",
         ("endpoint", "status")),
    Spec("quire_router_requests_in_flight", Kind.GAUGE, "Requests being answered."),
    Spec("quire_router_request_seconds", Kind.HISTOGRAM,
         "From the head of a request to the end of its answer.", ("endpoint",), _SECONDS),
    Spec("quire_router_choices_total", Kind.COUNTER,
         "Servers chosen, by side and by what decided: affinity, load, only (there was one).",
         ("side", "by")),
    Spec("quire_router_retries_total", Kind.COUNTER,
         "Tries that failed and that another server could be asked after, by reason.",
         ("reason",)),
    Spec("quire_router_failovers_total", Kind.COUNTER,
         "Streams whose server was lost on the way, by outcome: resumed, diverged, failed.",
         ("outcome",)),
    Spec("quire_router_keys_failures_total", Kind.COUNTER,
         "Prompts whose page keys could not be had: chosen by load."),
    Spec("quire_router_aborts_total", Kind.COUNTER,
         "Requests given up, by reason: disconnect.", ("reason",)),
    Spec("quire_router_unexpected_errors_total", Kind.COUNTER,
         "Requests that failed by a bug: each has a traceback in the log."),
    Spec("quire_router_spans_total", Kind.COUNTER,
         "With --otlp, spans by what became of them: exported, refused, dropped.", ("outcome",)),
    Spec("quire_router_member_up", Kind.GAUGE,
         "1 while a server is used, 0 while it is down or unfit.", ("url", "side")),
    Spec("quire_router_member_requests", Kind.GAUGE,
         "Requests of this router at a server.", ("url", "side")),
    Spec("quire_router_index_keys", Kind.GAUGE,
         "Pages of which the router remembers who holds them."),
)  # fmt: skip


class RouterMetrics:
    """One router's."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests_total")
        self.in_flight = self._gauge("requests_in_flight")
        spec = _spec("request_seconds")
        self.request_seconds = Histogram(
            spec.name, spec.help, spec.labels, registry=self._registry, buckets=spec.buckets
        )
        self.choices = self._counter("choices_total")
        self.retries = self._counter("retries_total")
        self.failovers = self._counter("failovers_total")
        self.keys_failures = self._counter("keys_failures_total")
        self.aborts = self._counter("aborts_total")
        self.unexpected_errors = self._counter("unexpected_errors_total")
        self.spans = self._counter("spans_total")
        self._member_up = self._gauge("member_up")
        self._member_requests = self._gauge("member_requests")
        self._index_keys = self._gauge("index_keys")

    def exposition(self, fleet: Fleet) -> bytes:
        self._index_keys.set(len(fleet.index))
        for member in fleet.members:
            self._member_up.labels(member.url, member.side).set(member.is_up)
            self._member_requests.labels(member.url, member.side).set(member.in_flight)
        return generate_latest(Listed(self._registry))

    def _counter(self, name: str) -> Counter:
        spec = _spec(name)
        return Counter(spec.name, spec.help, spec.labels, registry=self._registry)

    def _gauge(self, name: str) -> Gauge:
        spec = _spec(name)
        return Gauge(spec.name, spec.help, spec.labels, registry=self._registry)


def _spec(name: str) -> Spec:
    return next(spec for spec in ROUTER_METRICS if spec.name == f"quire_router_{name}")
