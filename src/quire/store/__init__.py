"""L3: stores for pages, and the client that seals and verifies what goes through them.

`open_store(url)` finds a backend by its URL's scheme; `PageStore` is what a worker uses on it;
`open_pages(urls)` gives a worker one store, or several in front of each other.
"""

from quire.store.base import (
    HEADER_BYTES,
    Blob,
    NewObject,
    ObjectName,
    Pages,
    Part,
    Store,
    StoredObject,
    StoreStats,
)
from quire.store.breaker import Breaker, BreakerState
from quire.store.client import PageStore
from quire.store.codec import Mismatch
from quire.store.opening import check_pages, open_pages
from quire.store.url import StoreURL, open_store

__all__ = [
    "HEADER_BYTES",
    "Blob",
    "Breaker",
    "BreakerState",
    "Mismatch",
    "NewObject",
    "ObjectName",
    "PageStore",
    "Pages",
    "Part",
    "Store",
    "StoreStats",
    "StoreURL",
    "StoredObject",
    "check_pages",
    "open_pages",
    "open_store",
]
