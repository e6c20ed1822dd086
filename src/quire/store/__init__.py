"""L3: stores for pages, and the client that seals and verifies what goes through them.

`open_store(url)` finds a backend by its URL's scheme; `PageStore` is what a worker uses on it.
"""

from quire.store.base import (
    HEADER_BYTES,
    Blob,
    NewObject,
    ObjectName,
    Part,
    Store,
    StoredObject,
    StoreStats,
)
from quire.store.breaker import Breaker, BreakerState
from quire.store.client import PageStore
from quire.store.codec import Mismatch
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
    "Part",
    "Store",
    "StoreStats",
    "StoreURL",
    "StoredObject",
    "open_store",
]
