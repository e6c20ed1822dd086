"""QuireConnector: what vLLM calls, on both sides, and nothing else.

One instance in the scheduler's process has a Leader, one in each worker has Hands; every call is
passed on to it in a line or two. What crosses between them are Orders and reports, which vLLM
carries. Written for vLLM 0.32.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from quire.integrations.vllm.adapters import AdapterFiles
from quire.integrations.vllm.hands import Hands, by_name
from quire.integrations.vllm.leader import Leader
from quire.integrations.vllm.metrics import QuirePromMetrics, QuireStats
from quire.integrations.vllm.naming import Naming, VllmRequest
from quire.integrations.vllm.options import VllmOptions, read_options
from quire.integrations.vllm.orders import Orders, Setup, unpack_reports
from quire.integrations.vllm.setup import cache_config, components, namespace, plan
from quire.integrations.vllm.tensors import describe
from quire.integrations.vllm.vllm_events import told
from quire.manager import CacheManager

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.distributed.kv_events import KVCacheEvent

_logger = logging.getLogger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler → workers, once per step."""

    orders: Orders


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Workers → scheduler, once per step in which there is news."""

    reports: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        assert isinstance(other, StepReports)
        return StepReports(self.reports + other.reports)


class QuireConnector(KVConnectorBase_V1, SupportsHMA):
    """One option of vLLM: host memory and a store behind its own KV cache."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = read_options(transfer.kv_connector_extra_config)
        self._plan = plan(vllm_config, kv_cache_config, self._options)
        self._leader: Leader | None = None
        self._hands: Hands | None = None
        if role is KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                _logger.warning(
                    "kv_load_failure_policy is %r: a request whose pages cannot be loaded fails; "
                    "with 'recompute' it goes on",
                    transfer.kv_load_failure_policy,
                )
            self._leader = self._make_leader(self._options)

    def _make_leader(self, options: VllmOptions) -> Leader:
        names = namespace(self._vllm_config, self._plan, options)
        events = self._vllm_config.kv_events_config
        config = cache_config(
            self._plan, options, events=events is not None and events.enable_kv_cache_events
        )
        manager = CacheManager(config, clock=time.monotonic, components=components(self._plan))
        setup = Setup(names.model_fingerprint, self._plan.host_pages, names.page_size)
        return Leader(
            options,
            manager,
            Naming(names, AdapterFiles().identify),
            setup,
            [kind.groups for kind in self._plan.kinds],
            clock=time.monotonic,
            new_name=lambda: secrets.token_hex(16),
        )

    @property
    def leader(self) -> Leader:
        assert self._leader is not None, "a worker has no leader"
        return self._leader

    @property
    def hands(self) -> Hands:
        assert self._hands is not None, "register_kv_caches comes first"
        return self._hands

    @property
    def requires_kv_delivery(self) -> bool:
        """A page that is not saved is a miss, and no more."""
        return False

    # ---- the scheduler's side -------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: VllmRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count = self.leader.matched(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: VllmRequest, blocks: Any, num_external_tokens: int
    ) -> None:
        block_ids = blocks.get_block_ids() if num_external_tokens else ()
        self.leader.allocated(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: VllmRequest, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        disk = self.leader.from_store(request, num_external_tokens)
        counts = {CacheHitSource.HOST: num_external_tokens - disk, CacheHitSource.DISK: disk}
        return {source: count for source, count in counts.items() if count}

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        # Not its get_block_ids, which knows only who is in this step.
        orders = self.leader.orders(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.kv_connector_block_state.resolve_block_ids,
            preempted=bool(scheduler_output.preempted_req_ids),
            idle=scheduler_output.total_num_scheduled_tokens == 0,
        )
        return StepMetadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, StepReports):
            self.leader.hear(one for data in meta.reports for one in unpack_reports(data))

    def request_finished_all_groups(
        self, request: VllmRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.leader.finished(request, block_ids), None

    def has_pending_block_frees(self) -> bool:
        return self.leader.will_free

    def has_pending_push_work(self) -> bool:
        return self.leader.has_work

    def reset_cache(self) -> bool:
        return self.leader.reset()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return told(self.leader.take_events(), self._plan.page_size)

    def get_kv_connector_stats(self) -> QuireStats | None:
        counts = self._leader.take_counts() if self._leader is not None else {}
        return QuireStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> QuireStats:
        return QuireStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> QuirePromMetrics:
        return QuirePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- a worker's side ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        kinds = [
            describe(
                [by_name(kv_caches, names) for names in kind.layers], kind.shape, kind.component
            )
            for kind in self._plan.kinds
        ]
        self._hands = Hands(
            get_tensor_model_parallel_rank(), self._plan.num_ranks, kinds, self._plan.host_pages
        )

    @property
    def _step(self) -> Orders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.orders

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self.hands.finish_copies(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads of a step begin with its saves, in `wait_for_save`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before their request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pages are saved when they are full, all layers at once."""

    def wait_for_save(self) -> None:
        """Begin copies, now that the step has computed; blocks stay until these are reported."""
        self.hands.obey(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.hands.look(idle=self._step.idle)
        received, failed = self.hands.accounts.take_received()
        return KVConnectorTransferResults(self.hands.accounts.take_sent(), received, failed)

    def build_connector_worker_meta(self) -> StepReports | None:
        data = self.hands.accounts.take_reports()
        return StepReports([data]) if data else None

    def shutdown(self) -> None:
        if self._hands is not None:
            self._hands.close()
            self._hands = None
