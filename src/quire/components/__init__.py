"""The kinds of state a page can need. `full` is the first of several."""

from quire.components.base import Component, Guard, usable_pages
from quire.components.full import FullAttention

__all__ = ["Component", "FullAttention", "Guard", "usable_pages"]
