"""What the router exposes to Prometheus. ROUTER_METRICS is the one list, as in the server's."""

from __future__ import annotations

from quire.router.fleet import Fleet
from quire.web.metrics import COUNTER, GAUGE, HISTOGRAM, Instruments, Spec

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

ROUTER_METRICS = (
    Spec("quire_router_requests_total", COUNTER,
         "Requests answered, by endpoint and HTTP status; 499: the client went away first.",
         ("endpoint", "status")),
    Spec("quire_router_requests_in_flight", GAUGE, "Requests being answered."),
    Spec("quire_router_request_seconds", HISTOGRAM,
         "From the head of a request to the end of its answer.", ("endpoint",), _SECONDS),
    Spec("quire_router_choices_total", COUNTER,
         "Servers chosen, by side and by what decided: affinity, load, only (there was one).",
         ("side", "by")),
    Spec("quire_router_retries_total", COUNTER,
         "Tries that failed and that another server could be asked after, by reason.",
         ("reason",)),
    Spec("quire_router_failovers_total", COUNTER,
         "Streams whose server was lost on the way, by outcome: resumed, diverged, failed.",
         ("outcome",)),
    Spec("quire_router_keys_failures_total", COUNTER,
         "Prompts whose page keys could not be had: chosen by load."),
    Spec("quire_router_aborts_total", COUNTER,
         "Requests given up, by reason: disconnect.", ("reason",)),
    Spec("quire_router_unexpected_errors_total", COUNTER,
         "Requests that failed by a bug: each has a traceback in the log."),
    Spec("quire_router_spans_total", COUNTER,
         "With --otlp, spans by what became of them: exported, refused, dropped.", ("outcome",)),
    Spec("quire_router_member_up", GAUGE,
         "1 while a server is used, 0 while it is down or unfit.", ("url", "side")),
    Spec("quire_router_member_requests", GAUGE,
         "Requests of this router at a server.", ("url", "side")),
    Spec("quire_router_index_keys", GAUGE,
         "Pages of which the router remembers that a server holds them; of each server its own."),
)  # fmt: skip


class RouterMetrics:
    """One router's."""

    def __init__(self) -> None:
        self._instruments = Instruments(ROUTER_METRICS)
        counter, gauge = self._instruments.counter, self._instruments.gauge
        self.requests = counter("quire_router_requests_total")
        self.in_flight = gauge("quire_router_requests_in_flight")
        self.request_seconds = self._instruments.histogram("quire_router_request_seconds")
        self.choices = counter("quire_router_choices_total")
        self.retries = counter("quire_router_retries_total")
        self.failovers = counter("quire_router_failovers_total")
        self.keys_failures = counter("quire_router_keys_failures_total")
        self.aborts = counter("quire_router_aborts_total")
        self.unexpected_errors = counter("quire_router_unexpected_errors_total")
        self.spans = counter("quire_router_spans_total")
        self._member_up = gauge("quire_router_member_up")
        self._member_requests = gauge("quire_router_member_requests")
        self._index_keys = gauge("quire_router_index_keys")

    def exposition(self, fleet: Fleet) -> bytes:
        self._index_keys.set(len(fleet.index))
        for member in fleet.members:
            self._member_up.labels(member.url, member.side).set(member.is_up)
            self._member_requests.labels(member.url, member.side).set(member.in_flight)
        return self._instruments.exposition()
