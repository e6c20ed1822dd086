"""From settings to what an engine is started with, once the model is known."""

from __future__ import annotations

from pathlib import Path

from quire.engine.config import EngineConfig
from quire.engine.kvevents.config import Publishing
from quire.errors import MemoryBudgetError
from quire.models import EMBEDDED_NAME
from quire.models.weights import weight_totals
from quire.settings.machine import Machine, cuda_device_bytes
from quire.settings.options import Settings
from quire.settings.values import NONE
from quire.sizes import format_bytes

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def engine_config(
    effective: Settings, machine: Machine, directory: Path, name: str
) -> EngineConfig:
    """`effective` as machine.effective gives them. Raises ConfigError, MemoryBudgetError."""
    assert effective.device is not None
    assert effective.dtype is not None
    assert effective.host_memory is not None
    device_bytes = effective.device_memory
    if device_bytes is None:
        weights = weights_bytes(directory, effective.dtype)
        device_bytes = _auto_device_bytes(effective.tp, machine, weights)
    return EngineConfig(
        model=str(directory),
        name=name,
        device=effective.device,
        dtype=effective.dtype,
        forward=effective.forward,
        attention=effective.attention,
        cuda_graphs=effective.cuda_graphs,
        copies=effective.copies,
        page_size=effective.page_size,
        device_bytes=device_bytes,
        measure_device=effective.device_memory is None,
        host_bytes=effective.host_memory,
        store=None if effective.store == NONE else effective.store,
        write_policy=effective.write_policy,
        prefetch_policy=effective.prefetch_policy,
        prefetch_threshold=effective.prefetch_threshold,
        tp=effective.tp,
        max_context=effective.max_context,
        max_running=effective.max_running,
        max_waiting=effective.max_waiting,
        tenant_share=effective.tenant_share,
        chunk_tokens=effective.chunk_tokens,
        typical_tokens=effective.typical_tokens or 0,
        audit=effective.audit,
        snapshot_every=effective.snapshot_every,
        snapshots_per_path=effective.snapshots_per_path,
        threads=effective.threads or 0,
        speculate=effective.speculate,
        draft_tokens=effective.draft_tokens,
        role=effective.role,
        peer_host=effective.peer_host,
        peer_port=effective.peer_port,
        peer_secret=effective.peer_secret or "",
        peer_transport=effective.peer_transport,
        prefill=list(effective.prefill),
        peers=list(effective.peers),
        decode_cache=effective.decode_cache,
        decode_restore=effective.decode_restore,
        decode_computes=effective.decode_computes or 0,
        handover_timeout_s=effective.handover_timeout,
        kv_events=_publishing(effective),
        debug=effective.debug,
    )


def _publishing(effective: Settings) -> Publishing | None:
    if effective.kv_events is None:
        return None
    return Publishing(
        effective.kv_events, effective.kv_events_replay or "", effective.kv_events_topic
    )


def served_name(model: str | None) -> str:
    """What clients call it: the name of the directory or file, as the user knows it."""
    if model is None:
        return EMBEDDED_NAME
    path = Path(model).expanduser().absolute()
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def weights_bytes(directory: Path, dtype: str) -> int:
    """On the device. Raises ModelError."""
    return weight_totals(directory).num_parameters * _DTYPE_BYTES[dtype]


def _auto_device_bytes(tp: int, machine: Machine, weights: int) -> int:
    free = min(machine.gpus[:tp])
    size = cuda_device_bytes(free, weights, tp)
    if size <= 0:
        raise MemoryBudgetError(
            f"the weights need {format_bytes(weights)} and {format_bytes(free)} are free on each "
            f"of {tp} GPU(s): free some, raise tp, or use a smaller model"
        )
    return size
