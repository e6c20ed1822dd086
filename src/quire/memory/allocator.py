"""PageAllocator: which pages of a pool are free. Numbers only; no memory, no torch.

One allocator per (component, tier) lives with the leader; workers never allocate.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.errors import InvariantError
from quire.types import NO_PAGES, PAGE_ID_BYTES, PageIds, page_array, page_ids


class PageAllocator:
    """A stack of free pages. allocate and free cost O(pages moved), whatever the pool's size."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = bytearray(page_ids(range(num_pages - 1, -1, -1)))
        """Free pages as PageIds; taken from and put back at the end."""
        self.num_free = num_pages

    def allocate(self, count: int) -> PageIds | None:
        """`count` pages, or None and nothing changed."""
        if count > self.num_free:
            return None
        if count == 0:
            return NO_PAGES
        stack, size = self._stack, count * PAGE_ID_BYTES
        pages = PageIds(bytes(stack[-size:]))
        del stack[-size:]
        self.num_free -= count
        return pages

    def free(self, pages: PageIds) -> None:
        """Give pages back. Freeing more than is out is an InvariantError."""
        self._stack += pages
        self.num_free += len(pages) // PAGE_ID_BYTES
        if self.num_free > self.num_pages:
            raise InvariantError(f"{self.num_free} pages are free in a pool of {self.num_pages}")

    def free_pages(self) -> npt.NDArray[np.int32]:
        """The free pages, for check_invariants()."""
        return page_array(PageIds(bytes(self._stack)))
