"""What the server exposes to Prometheus. METRICS is the one list: instruments, the exposition and
docs/metrics.md all come from it.

No globals: each server has its own registry. The engine's figures come from its EngineStatus at the
moment of the scrape; those of the server are counted here as things happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.messages import (
    CachedTokens,
    DraftStatus,
    EngineInfo,
    EngineStatus,
    Handed,
    HandoverStatus,
    StoreStatus,
)
from quire.text.tools.base import Reason
from quire.web.metrics import COUNTER, GAUGE, HISTOGRAM, Instruments, Spec

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_PER_TOKEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)

SERVER_METRICS = (
    Spec("quire_requests_total", COUNTER,
         "Requests answered, by endpoint and HTTP status; 499: the client went away first.",
         ("endpoint", "status")),
    Spec("quire_requests_in_flight", GAUGE, "Requests being answered."),
    Spec("quire_request_seconds", HISTOGRAM,
         "From the head of a request to the end of its answer.", ("endpoint",), _SECONDS),
    Spec("quire_time_to_first_token_seconds", HISTOGRAM,
         "From a choice's start, after tokenising, to its first token.", (), _FIRST_TOKEN),
    Spec("quire_time_per_output_token_seconds", HISTOGRAM,
         "Mean time between the tokens of a choice, after the first.", (), _PER_TOKEN),
    Spec("quire_handover_stage_seconds", HISTOGRAM,
         "Of hand-overs that have ended: looked (until it was known what is here), moved (until "
         "the rest had come), gave (to another engine, until that needed no more).",
         ("stage",), _SECONDS),
    Spec("quire_prompt_tokens_total", COUNTER, "Tokens of prompts given to the engine."),
    Spec("quire_generated_tokens_total", COUNTER, "Tokens generated."),
    Spec("quire_cached_tokens_total", COUNTER,
         "Tokens of prompts that were not computed, by the tier they were found in; prefill_…: by "
         "the prefill server, which handed them over; store_left: those that the store had too, "
         "and that were computed.", ("tier",)),
    Spec("quire_tool_calls_total", COUNTER, "Calls of functions found in answers."),
    Spec("quire_malformed_tool_calls_total", COUNTER,
         "What began like a call and ended as text, by reason: unfinished, not_json, no_name, "
         "no_arguments, unknown_function, syntax, too_long.", ("reason",)),
    Spec("quire_aborts_total", COUNTER,
         "Requests given up, by reason: disconnect.", ("reason",)),
    Spec("quire_turned_away_total", COUNTER,
         "Requests answered 429, by reason: queue_full (here), engine (there).", ("reason",)),
    Spec("quire_unexpected_errors_total", COUNTER,
         "Requests that failed by a bug: each has a traceback in the log."),
    Spec("quire_spans_total", COUNTER,
         "With otlp, spans by what became of them: exported, refused (by the collector), dropped "
         "(it did not take them, and there was no more room).", ("outcome",)),
)  # fmt: skip

ENGINE_METRICS = (
    Spec("quire_engine_up", GAUGE, "1 while the engine lives."),
    Spec("quire_waiting_requests", GAUGE, "Requests queued in the engine."),
    Spec("quire_running_requests", GAUGE, "Requests being computed."),
    Spec("quire_waiting_tokens", GAUGE, "Prompt tokens queued in the engine."),
    Spec("quire_leases", GAUGE, "Leases held on cached pages."),
    Spec("quire_operations_in_flight", GAUGE,
         "Cache operations under way, by kind.", ("operation",)),
    Spec("quire_reuse_enabled", GAUGE,
         "0: the model failed its self-check at load, and every prompt is computed."),
    Spec("quire_tier_pages", GAUGE, "Pages a tier has room for.", ("tier", "component")),
    Spec("quire_tier_used_pages", GAUGE,
         "Pages of a tier that are not free.", ("tier", "component")),
    Spec("quire_tier_locked_pages", GAUGE,
         "Pages in use by requests or operations: not evictable.", ("tier", "component")),
    Spec("quire_tier_bytes", GAUGE, "Bytes a tier has room for.", ("tier", "component")),
    Spec("quire_tier_used_bytes", GAUGE,
         "Bytes of a tier that are not free.", ("tier", "component")),
    Spec("quire_tier_locked_bytes", GAUGE, "Bytes of locked pages.", ("tier", "component")),
    Spec("quire_matched_pages_total", COUNTER,
         "Pages found by prefix, by the tier they were in.", ("tier",)),
    Spec("quire_evicted_pages_total", COUNTER,
         "Pages evicted; host_spare: copies of pages that the device has too.", ("tier",)),
    Spec("quire_moved_pages_total", COUNTER,
         "Pages moved between tiers: backup, load, write, fetch.", ("operation",)),
    Spec("quire_moved_bytes_total", COUNTER,
         "Bytes moved between tiers, for models whose pages are all of one size.", ("operation",)),
    Spec("quire_operations_ended_total", COUNTER,
         "Cache operations that have ended, by kind.", ("operation",)),
    Spec("quire_operation_seconds_total", COUNTER,
         "Time they took from start to last report: divide by their number for the mean latency.",
         ("operation",)),
    Spec("quire_prefetch_fetched_total", COUNTER,
         "Prefetches that fetched, by how they got host pages: exact, evicted, truncated.",
         ("fit",)),
    Spec("quire_prefetch_declined_total", COUNTER,
         "Prefetches that did not happen, or ended with nothing, by reason.", ("reason",)),
    Spec("quire_faults_total", COUNTER,
         "Pages whose operation ended otherwise than well, by operation and status.",
         ("operation", "status")),
    Spec("quire_engine_events_total", COUNTER,
         "Everything else the engine and its cache count, by name.", ("event",)),
    Spec("quire_engine_seconds_total", COUNTER,
         "Time of the engine's main loop, by what it was spent on.", ("what",)),
    Spec("quire_drafts_total", COUNTER, "Steps of a request with tokens proposed ahead."),
    Spec("quire_proposed_tokens_total", COUNTER,
         "Tokens proposed ahead, by their position in the draft: 1 is the first.", ("position",)),
    Spec("quire_accepted_tokens_total", COUNTER,
         "Those of them that the model would have said. Tokens per step of a request that had a "
         "draft: 1 + all of these ÷ quire_drafts_total.", ("position",)),
    Spec("quire_store_attached", GAUGE, "1 while a store is attached."),
    Spec("quire_store_answers", GAUGE,
         "Of each store, one after the other: 0 while its breaker is open, and it is not asked.",
         ("store",)),
    Spec("quire_store_read_seconds_per_page", GAUGE,
         "Of several stores, one after the other: what a page took that was read lately.",
         ("store",)),
    Spec("quire_store_bytes", GAUGE,
         "Of stores with a budget of their own, one after the other: used, max.",
         ("store", "what")),
    Spec("quire_store_events_total", COUNTER, "What the store's client counts.", ("event",)),
    Spec("quire_handovers_open", GAUGE, "Hand-overs under way, asked for and served."),
    Spec("quire_handover_pages_total", COUNTER,
         "Pages exchanged with other engines: sent, received.", ("direction",)),
    Spec("quire_handover_bytes_total", COUNTER,
         "Bytes exchanged with other engines: sent, received.", ("direction",)),
    Spec("quire_handovers_total", COUNTER, "Hand-overs received in full."),
    Spec("quire_peer_strangers_total", COUNTER,
         "Connections of other engines, or of others, that did not get through the handshake."),
    Spec("quire_handover_seconds_total", COUNTER,
         "Time they took from the first word to the last page: divide for the mean latency."),
    Spec("quire_restores_total", COUNTER,
         "Own parts of a handed-over prompt brought back from host and store: ready, failed.",
         ("outcome",)),
    Spec("quire_restore_seconds_total", COUNTER,
         "Time they took: divide for the mean latency.", ("outcome",)),
    Spec("quire_promised_pages_total", COUNTER,
         "Pages that prefill servers were told they need not send."),
    Spec("quire_restored_pages_total", COUNTER,
         "Those of the promised pages that were then really there."),
    Spec("quire_handover_repairs_total", COUNTER,
         "Pages asked for again, by reason.", ("reason",)),
    Spec("quire_handovers_local_total", COUNTER,
         "Hand-overs that came to nothing: the prompt was computed here. By reason.", ("reason",)),
    Spec("quire_peer_link", GAUGE,
         "1 for each peer connected to, with how that stands.", ("peer", "state")),
    Spec("quire_peer_transport", GAUGE,
         "1 for each peer that is there, with what its pages are read by: shm, nixl or tcp.",
         ("peer", "transport")),
    Spec("quire_peer_received_bytes_total", COUNTER,
         "Bytes of pages received from other engines, by transport.", ("transport",)),
)  # fmt: skip

LOAD_METRICS = (
    Spec("vllm:num_requests_running", GAUGE,
         "As quire_running_requests, by the name that routers of vLLM servers read (llm-d's).",
         ("model_name",)),
    Spec("vllm:num_requests_waiting", GAUGE,
         "As quire_waiting_requests, by that name.", ("model_name",)),
    Spec("vllm:kv_cache_usage_perc", GAUGE,
         "Share of the device's pages that requests use, 1 for all of them; what is only cached "
         "counts as free, as it does in vLLM.", ("model_name",)),
    Spec("vllm:cache_config_info", GAUGE,
         "1, with the tokens of a page and the pages of the device.",
         ("model_name", "block_size", "num_gpu_blocks")),
)  # fmt: skip
"""How busy it is, for routers that do not know us."""

METRICS = SERVER_METRICS + ENGINE_METRICS + LOAD_METRICS
_COLLECTED = {spec.name: spec for spec in ENGINE_METRICS + LOAD_METRICS}

_MATCHED = {"matched_device_pages": "device", "matched_host_pages": "host"}
_EVICTED = {
    "evicted_device_pages": "device",
    "evicted_host_pages": "host",
    "evicted_spare_pages": "host_spare",
}
_MOVED = {
    "backed_up_pages": "backup",
    "loaded_pages": "load",
    "written_pages": "write",
    "fetched_pages": "fetch",
}


class Metrics:
    """One server's."""

    def __init__(self) -> None:
        self._instruments = Instruments(SERVER_METRICS)
        self._engine = _EngineCollector()
        self._instruments.registry.register(self._engine)
        counter, histogram = self._instruments.counter, self._instruments.histogram
        self.requests = counter("quire_requests_total")
        self.in_flight = self._instruments.gauge("quire_requests_in_flight")
        self.request_seconds = histogram("quire_request_seconds")
        self.prompt_tokens = counter("quire_prompt_tokens_total")
        self.generated_tokens = counter("quire_generated_tokens_total")
        self.aborts = counter("quire_aborts_total")
        self.tool_calls = counter("quire_tool_calls_total")
        self.malformed_calls = counter("quire_malformed_tool_calls_total")
        for reason in Reason:
            self.malformed_calls.labels(reason)
        self.turned_away = counter("quire_turned_away_total")
        self.unexpected_errors = counter("quire_unexpected_errors_total")
        self.spans = counter("quire_spans_total")
        for outcome in ("exported", "refused", "dropped"):
            self.spans.labels(outcome)
        self._cached_tokens = counter("quire_cached_tokens_total")
        self._first_token = histogram("quire_time_to_first_token_seconds")
        self._per_token = histogram("quire_time_per_output_token_seconds")
        self._handover_stages = histogram("quire_handover_stage_seconds")
        for stage in ("looked", "moved", "gave"):
            self._handover_stages.labels(stage)

    def handed_over(self, handed: Handed) -> None:
        seconds, stages = handed.ended_s - handed.began_s, self._handover_stages
        if handed.is_giver:
            stages.labels("gave").observe(seconds)
            return
        moving_s = handed.about.get("moving_s")
        if moving_s is None:
            stages.labels("looked").observe(seconds)
        else:
            stages.labels("looked").observe(max(0.0, seconds - float(moving_s)))
            stages.labels("moved").observe(float(moving_s))

    def cached(self, tokens: CachedTokens) -> None:
        for tier in tokens.__struct_fields__:
            self._cached_tokens.labels(tier).inc(getattr(tokens, tier))

    def timing(self, clock: Callable[[], float]) -> Timing:
        """Of one choice, from now."""
        return Timing(clock, self.generated_tokens, self._first_token, self._per_token)

    def exposition(
        self, status: EngineStatus | None, *, is_up: bool, info: EngineInfo | None = None
    ) -> bytes:
        self._engine.status = status or self._engine.status
        self._engine.info = info or self._engine.info
        self._engine.is_up = is_up
        return self._instruments.exposition()


class Timing:
    """When one choice's tokens came."""

    def __init__(
        self,
        clock: Callable[[], float],
        generated_tokens: Counter,
        first_token: Histogram,
        per_token: Histogram,
    ) -> None:
        self._clock = clock
        self._generated_tokens = generated_tokens
        self._first_token = first_token
        self._per_token = per_token
        self._started = clock()
        self._first: float | None = None
        self._last = self._started
        self._num_tokens = 0

    def tokens(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        self._last = self._clock()
        self._num_tokens += num_tokens
        self._generated_tokens.inc(num_tokens)
        if self._first is None:
            self._first = self._last
            self._first_token.observe(self._first - self._started)

    def done(self) -> None:
        if self._first is not None and self._num_tokens > 1:
            self._per_token.observe((self._last - self._first) / (self._num_tokens - 1))


class _EngineCollector(Collector):
    """The last EngineStatus, as metrics."""

    def __init__(self) -> None:
        self.status: EngineStatus | None = None
        self.info: EngineInfo | None = None
        self.is_up = False

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering does not collect

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, labels, value in self._samples():
            spec = _COLLECTED[name]
            if name not in families:
                family = CounterMetricFamily if spec.kind is COUNTER else GaugeMetricFamily
                families[name] = family(name, spec.help, labels=spec.labels)
            families[name].add_metric(labels, value)
        yield from families.values()

    def _samples(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        yield "quire_engine_up", (), self.is_up
        status = self.status
        if status is None:
            return
        yield "quire_reuse_enabled", (), status.reuse
        yield "quire_waiting_requests", (), status.waiting
        yield "quire_running_requests", (), status.running
        yield "quire_waiting_tokens", (), status.waiting_tokens
        yield "quire_leases", (), status.leases
        for operation, count in status.operations.items():
            yield "quire_operations_in_flight", (operation,), count
        for operation, ended in status.ended.items():
            yield "quire_operations_ended_total", (operation,), ended.count
            yield "quire_operation_seconds_total", (operation,), ended.seconds
        for tier in status.tiers:
            for what, pages in (
                ("", tier.num_pages),
                ("used_", tier.used_pages),
                ("locked_", tier.locked_pages),
            ):
                labels = (tier.name, tier.component)
                yield f"quire_tier_{what}pages", labels, pages
                yield f"quire_tier_{what}bytes", labels, pages * tier.page_bytes
        # Pages of several components differ in size, and are counted together.
        sizes = {tier.page_bytes for tier in status.tiers}
        page_bytes = sizes.pop() if len(sizes) == 1 else 0
        for name, count in status.counters.items():
            yield from _counted(name, count, page_bytes)
        for what, seconds in status.seconds.items():
            yield "quire_engine_seconds_total", (what,), seconds
        yield "quire_store_attached", (), status.store.state == "attached"
        yield from _stood(status.store)
        for event, count in status.store.counters.items():
            yield "quire_store_events_total", (event,), count
        if status.drafts is not None:
            yield from _drafted(status.drafts)
        if status.handover is not None:
            yield from _handed_over(status.handover)
        if self.info is not None:
            yield from _busy(status, self.info)


def _busy(status: EngineStatus, info: EngineInfo) -> Iterator[tuple[str, tuple[str, ...], float]]:
    yield "vllm:num_requests_running", (info.name,), status.running
    yield "vllm:num_requests_waiting", (info.name,), status.waiting
    for tier in status.tiers:
        if (tier.name, tier.component) == ("device", "full"):
            share = tier.locked_pages / max(1, tier.num_pages)
            yield "vllm:kv_cache_usage_perc", (info.name,), share
            about = info.name, str(info.page_size), str(tier.num_pages)
            yield "vllm:cache_config_info", about, 1


def _stood(status: StoreStatus) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for number, health in enumerate(status.stores):
        store = str(number)
        yield "quire_store_answers", (store,), health.answers
        if health.read_us_per_page is not None:
            yield "quire_store_read_seconds_per_page", (store,), health.read_us_per_page / 1e6
        if health.budget is not None:
            yield "quire_store_bytes", (store, "used"), health.budget.used_bytes
            yield "quire_store_bytes", (store, "max"), health.budget.max_bytes


def _drafted(found: DraftStatus) -> Iterator[tuple[str, tuple[str, ...], float]]:
    yield "quire_drafts_total", (), found.num_drafts
    for position, count in enumerate(found.proposed, 1):
        yield "quire_proposed_tokens_total", (str(position),), count
    for position, count in enumerate(found.accepted, 1):
        yield "quire_accepted_tokens_total", (str(position),), count


def _handed_over(found: HandoverStatus) -> Iterator[tuple[str, tuple[str, ...], float]]:
    yield "quire_handovers_open", (), found.open
    yield "quire_handover_pages_total", ("sent",), found.sent_pages
    yield "quire_handover_pages_total", ("received",), found.received_pages
    yield "quire_handover_bytes_total", ("sent",), found.sent_bytes
    yield "quire_handover_bytes_total", ("received",), found.received_bytes
    yield "quire_handovers_total", (), found.transfers.count
    yield "quire_peer_strangers_total", (), found.strangers
    yield "quire_handover_seconds_total", (), found.transfers.seconds
    for outcome, ended in found.restores.items():
        yield "quire_restores_total", (outcome,), ended.count
        yield "quire_restore_seconds_total", (outcome,), ended.seconds
    yield "quire_promised_pages_total", (), found.promised_pages
    yield "quire_restored_pages_total", (), found.restored_pages
    for reason, count in found.repairs.items():
        yield "quire_handover_repairs_total", (reason,), count
    for reason, count in found.local.items():
        yield "quire_handovers_local_total", (reason,), count
    for peer, state in found.links.items():
        yield "quire_peer_link", (peer, state), 1
    for peer, transport in found.transports.items():
        yield "quire_peer_transport", (peer, transport), 1
    for transport, size_bytes in found.received_by.items():
        yield "quire_peer_received_bytes_total", (transport,), size_bytes


def _counted(
    name: str, count: int, page_bytes: int
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """One of the engine's counters, under the metric it belongs to."""
    group, colon, rest = name.partition(":")
    if name in _MATCHED:
        yield "quire_matched_pages_total", (_MATCHED[name],), count
    elif name in _EVICTED:
        yield "quire_evicted_pages_total", (_EVICTED[name],), count
    elif name in _MOVED:
        yield "quire_moved_pages_total", (_MOVED[name],), count
        if page_bytes:
            yield "quire_moved_bytes_total", (_MOVED[name],), count * page_bytes
    elif group == "prefetch_declined":
        yield "quire_prefetch_declined_total", (rest,), count
    elif group == "prefetch_fetched":
        yield "quire_prefetch_fetched_total", (rest,), count
    elif colon:
        yield "quire_faults_total", (group, rest), count
    else:
        yield "quire_engine_events_total", (name,), count
