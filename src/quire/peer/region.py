"""Region: the pages of one component on one rank, and how to cut them at heads.

A page travels as [num_layers, num_planes, *inner] with the heads asked for and no padding: when
they are all the heads held, these are the page's own bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.memory.page_layout import DTYPE_BYTES, InnerLayout, PageLayout


class PagePool(Protocol):
    """What is needed of HostPool, or of another engine's that is mapped."""

    @property
    def layout(self) -> PageLayout: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def descriptor(self) -> int | None: ...

    def page_view(self, page: int) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class Region:
    pool: PagePool
    first_head: int
    last_head: int
    """[first, last) of the model's heads."""

    @property
    def component(self) -> str:
        return self.pool.layout.component

    @property
    def num_heads(self) -> int:
        return self.last_head - self.first_head

    def holds(self, first_head: int, last_head: int) -> bool:
        return self.first_head <= first_head < last_head <= self.last_head

    def is_whole(self, first_head: int, last_head: int) -> bool:
        return (first_head, last_head) == (self.first_head, self.last_head)

    def cut_bytes(self, first_head: int, last_head: int) -> int:
        """Bytes of a page with only these heads."""
        return self.pool.layout.page_bytes // self.num_heads * (last_head - first_head)

    def page(self, page: int) -> memoryview:
        """The bytes that carry meaning, where they are."""
        return self.pool.page_view(page)[: self.pool.layout.page_bytes]

    def gather(self, page: int, first_head: int, last_head: int, out: memoryview) -> None:
        """Some heads of a page, into `out`."""
        held = self._heads(page, first_head, last_head)
        np.copyto(np.frombuffer(out, dtype=held.dtype).reshape(held.shape), held)

    def scatter(self, page: int, first_head: int, last_head: int, data: memoryview) -> None:
        """The reverse."""
        held = self._heads(page, first_head, last_head)
        np.copyto(held, np.frombuffer(data, dtype=held.dtype).reshape(held.shape))

    def copy_from(
        self, other: Region, their_page: int, page: int, first_head: int, last_head: int
    ) -> None:
        """Some heads, which both have, of another region's page. Lets go of the interpreter."""
        if self.is_whole(first_head, last_head) and other.is_whole(first_head, last_head):
            target = np.frombuffer(self.page(page), dtype=np.uint8)
            np.copyto(target, np.frombuffer(other.page(their_page), dtype=np.uint8))
            return
        heads = first_head, last_head
        np.copyto(self._heads(page, *heads), other._heads(their_page, *heads))

    def _heads(self, page: int, first_head: int, last_head: int) -> npt.NDArray[np.generic]:
        """A strided view of those heads of a page."""
        layout = self.pool.layout
        word = _word(layout)
        words = np.frombuffer(self.page(page), dtype=word)
        dim = layout.head_dim * DTYPE_BYTES[layout.dtype] // word.itemsize
        heads = slice(first_head - self.first_head, last_head - self.first_head)
        if layout.inner is InnerLayout.NHD:
            return words.reshape(-1, layout.page_size, self.num_heads, dim)[:, :, heads]
        return words.reshape(-1, self.num_heads, layout.page_size, dim)[:, heads]


def _word(layout: PageLayout) -> np.dtype[np.generic]:
    """The widest integers that a head's row divides into: copies move words, not bytes."""
    row_bytes = layout.head_dim * DTYPE_BYTES[layout.dtype]
    return np.dtype(
        next(kind for kind in ("u8", "u4", "u2", "u1") if row_bytes % int(kind[1]) == 0)
    )
