"""Runs where SGLang's package is: QuireStorage, made by SGLang's own factory and used as its cache
controller uses a backend.

    python sglang_trial.py FOLDER       ends with 0, or with what was not as it should be

SGLang's engine needs a GPU; its storage code does not, as long as the package's first file, which
imports all of it, is not run. Not a test: test_sglang.py starts it. Knows SGLang.
"""

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

PAGE, PAGES, LAYERS, HEADS, DIM = 16, 12, 3, 2, 8


class Pool:
    """A host pool as SGLang's with K and V per head, as far as storage goes: one whose pages lie
    together, and one whose layers do."""

    def __init__(self, layout: str) -> None:
        self.layout, self.page_size, self.layer_num = layout, PAGE, LAYERS
        self.head_num, self.head_dim = HEADS, DIM
        by_page = (2, PAGES * PAGE, LAYERS, HEADS, DIM)
        by_layer = (2, LAYERS, PAGES * PAGE, HEADS, DIM)
        shape = by_page if layout == "page_first" else by_layer
        self.kv_buffer = torch.zeros(shape, dtype=torch.bfloat16)

    def _page(self, index: int) -> torch.Tensor:
        tokens, buffer = slice(index, index + PAGE), self.kv_buffer
        return buffer[:, tokens] if self.layout == "page_first" else buffer[:, :, tokens]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self._page(index).flatten() if flat else self._page(index)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * LAYERS * PAGE * HEADS * DIM, dtype=torch.bfloat16)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self._page(index).copy_(data_page.view(self._page(index).shape))


def main(folder: Path) -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    package = types.ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations or [])
    sys.modules["sglang"] = package
    for layout in ("layer_first", "page_first"):
        check_layout(layout, folder / layout)
    check_hybrids_are_refused(folder)
    check_their_own_faults(folder / "faults")


def again(folder: Path, pool: Pool) -> Any:
    """A backend of its own, as in another process."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    extra = {
        "backend_name": "quire",
        "module_path": "quire.integrations.sglang",
        "class_name": "QuireStorage",
        "interface_v1": 1,
        "store": f"file://{folder}/quire?max=64MiB",
        "model_fingerprint": "w",
    }
    folder.mkdir(exist_ok=True)
    known = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0}
    known |= {"attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False}
    known |= {"is_page_first_layout": pool.layout == "page_first", "model_name": "m"}
    told = HiCacheStorageConfig(**{**known, "extra_config": extra})
    made = StorageBackendFactory.create_backend("dynamic", told, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def check_layout(layout: str, folder: Path) -> None:
    """What one engine keeps another finds, by either of SGLang's ways."""
    keys, slots = [f"{number:064x}" for number in range(8)], torch.arange(8 * PAGE)
    source, target = Pool(layout), Pool(layout)
    source.kv_buffer.copy_(torch.randn(source.kv_buffer.shape))
    pages = [source.get_data_page(at * PAGE) for at in range(8)]
    one = again(folder, source)
    assert one.batch_exists(keys) == 0
    assert one.batch_set(keys[:5], pages[:5])
    assert (one.exists(keys[0]), one.exists(keys[5])) == (True, False)
    assert one.batch_set(keys[5:], pages[5:])
    other = again(folder, target)
    assert other.batch_exists(keys) == 8
    assert other.batch_exists(["ff", *keys]) == 0
    rooms = [target.get_dummy_flat_data_page() for _ in keys]
    assert all(map(torch.equal, other.batch_get(keys, rooms), pages))
    assert other.get("ff", target.get_dummy_flat_data_page()) is None
    more = [f"{number:064x}" for number in range(100, 108)]
    assert all(again(folder, source).batch_set_v1(more, slots, prefix(keys)))
    target = Pool(layout)
    found = again(folder, target)
    assert found.batch_get_v1([*more[:4], "ff"], slots[: 5 * PAGE], prefix(keys)) == [
        *[True] * 4,
        False,
    ]
    assert all(torch.equal(target.get_data_page(at * PAGE), pages[at]) for at in range(4))
    unlike = Pool("page_first" if layout == "layer_first" else "layer_first")
    assert again(folder, unlike).batch_exists(keys) == 0, "its bytes lie in another order"


def prefix(keys: list[str]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    return HiCacheStorageExtraInfo(prefix_keys=keys)


def check_hybrids_are_refused(folder: Path) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    from quire.errors import ConfigError

    made = again(folder, Pool("page_first"))
    refusal = ""
    try:
        made.register_mem_host_pool_v2(None, PoolName.MAMBA)
    except ConfigError as error:
        refusal = str(error)
    assert "is not served" in refusal


def check_their_own_faults(folder: Path) -> None:
    """SGLang's failure injector around it: what is found is right."""
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.3"
    pool = Pool("page_first")
    made = again(folder, pool)
    assert type(made).__name__ == "HiCacheStorageFailureInjector"
    kept: dict[str, torch.Tensor] = {}
    for number in range(200):
        key, value = f"{number:064x}", torch.full_like(pool.get_dummy_flat_data_page(), number)
        if made.set(key, value):
            kept[key] = value
    found = {key: made.get(key, pool.get_dummy_flat_data_page()) for key in kept}
    right = [torch.equal(page, kept[key]) for key, page in found.items() if page is not None]
    assert all(right)
    assert 0 < len(right) < len(kept) < 200


if __name__ == "__main__":
    main(Path(sys.argv[1]))
