"""PageAllocator: which pages of a pool are free. Numbers only; no memory, no torch.

One allocator per (component, tier) lives with the leader; workers never allocate.
"""

from __future__ import annotations

import numpy as np

from quire.errors import InvariantError
from quire.types import NO_PAGES, PAGE_ID_BYTES, PageIds, page_array


class PageAllocator:
    """A stack of free pages. allocate and free cost O(pages moved), whatever the pool's size."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # _stack[:_top] are the free pages; the lowest numbers come out first.
        self._stack = np.arange(num_pages - 1, -1, -1, dtype="<i4")
        self._top = num_pages

    @property
    def num_free(self) -> int:
        return self._top

    def allocate(self, count: int) -> PageIds | None:
        """`count` pages, or None and nothing changed."""
        top = self._top - count
        if top < 0:
            return None
        if count == 0:
            return NO_PAGES
        self._top = top
        return PageIds(self._stack[top : top + count].tobytes())

    def free(self, pages: PageIds) -> None:
        """Give pages back. Freeing more than is out is an InvariantError."""
        count = len(pages) // PAGE_ID_BYTES
        top = self._top + count
        if top > self.num_pages:
            raise InvariantError(f"freed {count} pages with {self.num_pages - self._top} in use")
        self._stack[self._top : top] = page_array(pages)
        self._top = top

    def free_pages(self) -> set[int]:
        """The free pages as a set, for check_invariants()."""
        return set(self._stack[: self._top].tolist())
