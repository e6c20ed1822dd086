"""QuireStorage: what SGLang's HiCache calls, and nothing else. Knows SGLang; written for 0.5.23.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "quire",
        "module_path": "quire.integrations.sglang", "class_name": "QuireStorage",
        "interface_v1": 1, "store": "file:///var/cache/kv?max=200GiB"}'

SGLang's own file backend holds no page's format or checksum, and no path: here a page that does not
fit is a miss, and one is not kept without those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName

from quire.errors import ConfigError
from quire.integrations.sglang.sglang_pages import SglangPages, Shard, read_options
from quire.integrations.weight_identity import weights_of


class QuireStorage(HiCacheStorage):
    """One rank's pages in one of Quire's stores."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._options = read_options(storage_config.extra_config or {})
        if storage_config.attn_cp_size > 1 or storage_config.dcp_size > 1:
            raise ConfigError("context parallelism is not served: tensor and pipeline ranks are")
        self._pages: SglangPages | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's host pool, which tells what a page is."""
        super().register_mem_pool_host(mem_pool_host)
        config, page = self._config, mem_pool_host.get_dummy_flat_data_page()
        weights = self._options.model_fingerprint or weights_of(str(config.model_name))
        shape = ("layer_num", "page_size", "head_num", "head_dim", "kv_cache_dim")
        meaning = (
            weights,
            type(mem_pool_host).__name__,
            str(mem_pool_host.layout),
            str(page.dtype),
            *(f"{name}={getattr(mem_pool_host, name, '')}" for name in shape),
            f"stage {config.pp_rank} of {config.pp_size}",
        )
        # Latent attention keeps the same on every rank: one of them writes for all.
        rank, num_ranks = (0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size)
        self.close()
        self._pages = SglangPages(self._options, Shard(rank, num_ranks, meaning, page.nbytes))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool_name != PoolName.KV:
            raise ConfigError(
                f"a pool of kind {host_pool_name} is not served: windows and recurrent state would "
                "have to be kept with the pages that they belong to"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    @property
    def pages(self) -> SglangPages:
        assert self._pages is not None, "register_mem_pool_host comes first"
        return self._pages

    def exists(self, key: str) -> bool:
        return self.pages.num_present([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self.pages.num_present(keys)

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations)
        had = self.pages.get(keys, targets)
        return [target if ok else None for target, ok in zip(targets, had, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return all(self.pages.put(keys, list(values)))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        pool = self.mem_pool_host
        targets = [pool.get_dummy_flat_data_page() for _ in keys]
        had = self.pages.get(keys, targets)
        for first, target, ok in zip(self._firsts(host_indices), targets, had, strict=True):
            if ok:
                pool.set_from_flat_data_page(first, target)
        return had

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        before = getattr(extra_info, "prefix_keys", None) or [None]
        values = [self.mem_pool_host.get_data_page(at) for at in self._firsts(host_indices)]
        return self.pages.put(keys, values, before[-1])

    def clear(self) -> None:
        self.pages.clear()

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def _firsts(self, host_indices: torch.Tensor) -> Sequence[int]:
        """The first token slot of each page."""
        firsts: list[int] = host_indices[:: self.mem_pool_host.page_size].tolist()
        return firsts
