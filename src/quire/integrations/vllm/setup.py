"""What vLLM's configuration means for Quire, or why it cannot be served. Reads vLLM's objects by
their fields; imports none of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from quire.components import Component, FullAttention, PoolSize, SlidingWindow
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


_KINDS = {"FullAttentionSpec": "full", "MLAAttentionSpec": "full", "SlidingWindowSpec": "window"}
_WHY_NOT = {
    "MambaSpec": "states of recurrent layers lie in blocks that vLLM overwrites, and moves where "
    "it chooses: after which token a block's state is cannot be told from its place",
    "ChunkedLocalAttentionSpec": "what chunked attention needs of a prefix is no window behind its "
    "end",
}
TYPICAL_TOKENS = 8192
"""Of a prompt, by which the host's memory is divided among full pages and windows."""
POINTS = 2
"""Windows that a typical request leaves: at the end of its prompt, and at its own."""


@dataclass(frozen=True, slots=True)
class KvKind:
    """The layers of one kind of attention: a component of the cache."""

    component: str
    groups: tuple[int, ...]
    """vLLM's groups of layers, each with blocks of its own."""
    layers: list[list[str]]
    """Names, by group, in the model's order."""
    shape: BlockShape
    window: int
    """Tokens; 0: all that lie before."""
    page_bytes: int

    @property
    def stride(self) -> int:
        """Of a page on the host."""
        return -(-self.page_bytes // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def window_pages(self) -> int:
        return -(-(self.window - 1) // self.shape.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one engine, the same in all its processes."""

    kinds: list[KvKind]
    """Full attention first."""
    num_ranks: int
    host_pages: list[int]
    """Of each rank, by kind."""
    kv_dtype: str

    @property
    def page_size(self) -> int:
        return self.kinds[0].shape.tokens


def plan(vllm_config: Any, kv_cache_config: Any, options: VllmOptions) -> Plan:
    """Raises ConfigError, with the reason, for what cannot be right."""
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise ConfigError(f"kv_role is {role!r}: Quire loads and saves, so it must be 'kv_both'")
    _check_parallel(vllm_config.parallel_config)
    groups = list(enumerate(kv_cache_config.kv_cache_groups))
    for _, group in groups:
        _check_group(group)
    blocks = {group.kv_cache_spec.block_size for _, group in groups}
    if len(blocks) > 1:
        raise ConfigError(
            f"groups of layers have blocks of {sorted(blocks)} tokens: a page of Quire's is one "
            "block of each"
        )
    types = {_type(group.kv_cache_spec) for _, group in groups}
    if len(types) > 1:
        raise ConfigError(
            f"groups of layers keep their state as {', '.join(sorted(types))}: vLLM then clears "
            "blocks as it hands them out, while they may still be copied. Give all layers one type"
        )
    kinds = []
    for component in ("full", "window"):
        mine = [one for one in groups if _KINDS[type(one[1].kv_cache_spec).__name__] == component]
        if mine:
            kinds.append(_kind(component, mine, kv_cache_config.num_blocks))
    if kinds[0].window:
        raise ConfigError(
            "all layers have windows: Quire needs one of full attention, on whose pages the "
            "windows hang"
        )
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    typical = min(TYPICAL_TOKENS, vllm_config.model_config.max_model_len)
    host_pages = _divide(options.host_bytes // num_ranks, kinds, typical, num_ranks)
    dtype = str(groups[0][1].kv_cache_spec.dtype).removeprefix("torch.")
    return Plan(kinds, num_ranks, host_pages, dtype)


def _check_group(group: Any) -> None:
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    if kind not in _KINDS:
        why = _WHY_NOT.get(kind, "full attention and sliding windows are")
        raise ConfigError(f"a KV cache of kind {kind} is not served: {why}")
    if getattr(spec, "non_causal", False):
        raise ConfigError("the model's attention looks ahead: a prefix's state depends on its end")
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise ConfigError("vLLM keeps some of the model's blocks in a pool of their own")


def _type(spec: Any) -> str:
    quantised = getattr(spec, "kv_quant_mode", None)
    return str(spec.dtype) if not quantised else f"{spec.dtype} ({quantised})"


def _kind(component: str, groups: list[tuple[int, Any]], num_blocks: int) -> KvKind:
    specs = [group.kv_cache_spec for _, group in groups]
    alike = {(spec.num_kv_heads, spec.head_size, spec.dtype) for spec in specs}
    windows = {spec.sliding_window for spec in specs} if component == "window" else {0}
    if len(alike) > 1 or len(windows) > 1:
        raise ConfigError(
            f"layers of kind {component} differ (heads, width, type: {sorted(map(str, alike))}, "
            f"windows: {sorted(windows)}): Quire takes those that are alike"
        )
    first = specs[0]
    return KvKind(
        component,
        tuple(index for index, _ in groups),
        [sorted(group.layer_names, key=_position) for _, group in groups],
        BlockShape(num_blocks, first.block_size, first.num_kv_heads, first.head_size),
        windows.pop(),
        sum(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for _, g in groups),
    )


def _divide(budget: int, kinds: list[KvKind], typical_tokens: int, num_ranks: int) -> list[int]:
    """Host pages of each kind: as many typical prompts as fit, each with its windows."""
    full, windows = kinds[0], kinds[1:]
    pages = [POINTS * kind.window_pages for kind in windows]
    one = max(2, typical_tokens // full.shape.tokens) * full.stride
    share = budget / (one + sum(n * k.stride for n, k in zip(pages, windows, strict=True)))
    pages = [max(count, int(count * share)) for count in pages]
    left = budget - sum(n * k.stride for n, k in zip(pages, windows, strict=True))
    if left < 2 * full.stride:
        beside = " beside the windows of one request" if windows else ""
        raise ConfigError(
            f"host_memory holds {max(0, left // full.stride)} pages of {full.stride * num_ranks} "
            f"bytes{beside}: give it more"
        )
    return [left // full.stride, *pages]


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
    page_size, host_pages = plan.page_size, plan.host_pages[0]
    threshold = min(options.min_hit_tokens, max(1, host_pages // 2) * page_size)
    return CacheConfig(
        page_size=page_size,
        device_pages=plan.kinds[0].shape.num_blocks,
        host_pages=host_pages,
        num_ranks=plan.num_ranks,
        event_buffer=EVENTS_PER_PAGE * sum(plan.host_pages) if events else 0,
        event_tokens=events,
        prefetch=PrefetchConfig(
            threshold_tokens=max(1, threshold),
            base_timeout_s=min(1.0, options.wait_s),
            max_timeout_s=options.wait_s,
        ),
    )


def components(plan: Plan) -> list[Component]:
    """What the manager is to keep in step."""
    found: list[Component] = [FullAttention()]
    for kind, host_pages in zip(plan.kinds[1:], plan.host_pages[1:], strict=True):
        pool = PoolSize(kind.shape.num_blocks, host_pages)
        found.append(SlidingWindow(len(found), kind.window, plan.page_size, pool))
    return found


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
    return Namespace(digest.hexdigest(), plan.kv_dtype, plan.page_size)
