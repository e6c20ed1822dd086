"""PageLayout: what the bytes of one page mean, on the device and on the host.

Knows shapes and sizes only: no memory, no torch, so that the leader can size pools with it.

    device, layer-first   per layer and plane (K, V): [num_pages, *inner]
    host, page-first      per page:                   [num_layers, num_planes, *inner], padding

with inner = [page_size, heads, dim] (NHD) or [heads, page_size, dim] (HND). A *chunk* is one
(page, layer, plane): contiguous in both orders, so a transfer never permutes inside it.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from quire.errors import ConfigError

BLOCK_BYTES = 4096
"""Host pages start and end on this boundary: one page is one direct-I/O object in L3."""

_FORMAT = "quire-page-layout-1"

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
"""Element types a pool may hold, by their torch names."""


class InnerLayout(enum.Enum):
    """Order of the axes within one page of one plane."""

    NHD = "nhd"
    """[page_size, heads, dim]"""
    HND = "hnd"
    """[heads, page_size, dim]"""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of one component's pages on one rank.

    A component that is not K/V per layer describes itself in the same terms: latent attention has
    one plane; a recurrent snapshot is one plane of `uint8` with page_size 1, one head and the
    blob's length as head_dim; a draft is simply fewer layers.
    """

    component: str
    num_layers: int
    num_kv_heads: int
    """Heads of this rank's shard, not of the model."""
    head_dim: int
    dtype: str
    page_size: int
    inner: InnerLayout = InnerLayout.NHD
    num_planes: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ConfigError(f"dtype {self.dtype!r} is not supported: use one of {known}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size", "num_planes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")

    @property
    def inner_shape(self) -> tuple[int, int, int]:
        if self.inner is InnerLayout.NHD:
            return (self.page_size, self.num_kv_heads, self.head_dim)
        return (self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def chunk_bytes(self) -> int:
        """One page of one plane of one layer."""
        return self.page_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page that carry meaning."""
        return self.num_layers * self.num_planes * self.chunk_bytes

    @property
    def page_stride_bytes(self) -> int:
        """Distance between two host pages, and the length of a page in L3: whole blocks."""
        return -(-self.page_bytes // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def word_bytes(self) -> int:
        """Widest machine word chunks divide into; copies move words, not elements."""
        return next(width for width in (8, 4, 2, 1) if self.chunk_bytes % width == 0)

    def fingerprint(self, model_fingerprint: str) -> bytes:
        """32-byte digest of everything that gives a page's bytes their meaning.

        Every field is length-prefixed, so no two different layouts can spell the same input.
        """
        fields = (
            _FORMAT,
            model_fingerprint,
            self.component,
            self.dtype,
            self.inner.value,
            self.num_layers,
            self.num_planes,
            self.num_kv_heads,
            self.head_dim,
            self.page_size,
        )
        digest = hashlib.sha256()
        for field in fields:
            raw = str(field).encode()
            digest.update(len(raw).to_bytes(4, "little") + raw)
        return digest.digest()


def llama_3_1_8b(page_size: int = 64, dtype: str = "bfloat16") -> PageLayout:
    """131,072 bytes per token in bf16."""
    return PageLayout("full", 32, 8, 128, dtype, page_size)


def smollm2_135m(page_size: int = 64, dtype: str = "float32") -> PageLayout:
    """23,040 bytes per token in bf16; fp32, twice that, is what runs on a CPU."""
    return PageLayout("full", 30, 3, 64, dtype, page_size)
