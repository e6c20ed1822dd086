"""What vLLM's configuration means for Quire, or why it cannot be served. Reads vLLM's objects by
their fields; imports none of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from quire.config import CacheConfig, PrefetchConfig
from quire.errors import ConfigError
from quire.integrations.vllm.options import VllmOptions
from quire.integrations.vllm.tensors import BlockShape
from quire.integrations.weight_identity import weights_of
from quire.keys import Namespace
from quire.memory.page_layout import BLOCK_BYTES

EVENTS_PER_PAGE = 8
"""They are taken in every step, in which a page comes, is written and goes once or twice."""

_COMPUTED_BY = (
    "quantization",
    "quantization_config",
    "hf_config_path",
    "hf_overrides",
    "model_class_overrides",
)
"""Options of vLLM's model that decide what is computed with the files' weights."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one engine, the same in all its processes."""

    shape: BlockShape
    layers: list[str]
    """Names, in the model's order."""
    num_ranks: int
    host_pages: int
    """Of each rank."""
    kv_dtype: str


def plan(vllm_config: Any, kv_cache_config: Any, options: VllmOptions) -> Plan:
    """Raises ConfigError, with the reason, for what cannot be right."""
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise ConfigError(f"kv_role is {role!r}: Quire loads and saves, so it must be 'kv_both'")
    _check_parallel(vllm_config.parallel_config)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise ConfigError(
            f"the model has {len(groups)} groups of KV caches ({kinds}): Quire serves models with "
            "one. Windows are one group with --disable-hybrid-kv-cache-manager; recurrent layers "
            "are not served"
        )
    spec = groups[0].kv_cache_spec
    if not all(hasattr(spec, name) for name in ("num_kv_heads", "head_size", "dtype")):
        raise ConfigError(f"a KV cache of kind {type(spec).__name__} is not served: attention is")
    if getattr(spec, "non_causal", False):
        raise ConfigError("the model's attention looks ahead: a prefix's state depends on its end")
    shape = BlockShape(
        kv_cache_config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
    )
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    page_bytes = spec.page_size_bytes * len(groups[0].layer_names)
    stride = -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES
    host_pages = options.host_bytes // num_ranks // stride
    if host_pages < 2:
        raise ConfigError(
            f"host_memory holds {host_pages} pages of {stride * num_ranks} bytes: give it more"
        )
    names = sorted(groups[0].layer_names, key=_position)
    dtype = str(spec.dtype).removeprefix("torch.")
    return Plan(shape, names, num_ranks, host_pages, dtype)


def _position(name: str) -> tuple[list[int], str]:
    """Layers in the model's order: by the numbers in their names."""
    return [int(part) for part in name.split(".") if part.isdigit()], name


def _check_parallel(parallel: Any) -> None:
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} above 1 is not served: tensor parallelism is")


def cache_config(plan: Plan, options: VllmOptions, *, events: bool = False) -> CacheConfig:
    """`events`: somebody wants to hear what comes and goes."""
    page_size = plan.shape.tokens
    threshold = min(options.min_hit_tokens, max(1, plan.host_pages // 2) * page_size)
    return CacheConfig(
        page_size=page_size,
        device_pages=plan.shape.num_blocks,
        host_pages=plan.host_pages,
        num_ranks=plan.num_ranks,
        event_buffer=EVENTS_PER_PAGE * plan.host_pages if events else 0,
        event_tokens=events,
        prefetch=PrefetchConfig(
            threshold_tokens=max(1, threshold),
            base_timeout_s=min(1.0, options.wait_s),
            max_timeout_s=options.wait_s,
        ),
    )


def namespace(vllm_config: Any, plan: Plan, options: VllmOptions) -> Namespace:
    """Of the weights and of all else that vLLM lets decide what is computed with them."""
    model, load = vllm_config.model_config, vllm_config.load_config
    weights = options.model_fingerprint
    if not weights and model.hf_config_path:
        raise ConfigError(
            f"the model is described by {model.hf_config_path}, not by the file beside its weights:"
            " give model_fingerprint, a text that changes with both"
        )
    weights = weights or weights_of(str(model.model), model.revision, load.download_dir)
    if load.load_format == "dummy":  # not those of the files, but drawn by chance
        weights = f"dummy {model.seed} {weights}"
    # Pages hold what vLLM's own kernels computed: nobody else's are taken for them.
    fields = ["vllm", weights, str(model.dtype), str(vllm_config.cache_config.cache_dtype)]
    fields += [repr(getattr(model, name)) for name in _COMPUTED_BY]
    digest = hashlib.sha256()
    for text in fields:
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return Namespace(digest.hexdigest(), plan.kv_dtype, plan.shape.tokens)
