"""The leader: one single-threaded object that owns all metadata."""

from quire.manager.audits import Audit, AuditState
from quire.manager.costs import Way
from quire.manager.counters import Counters, Decline, Fit
from quire.manager.events import CacheEvent, EventBatch, EventKind
from quire.manager.exports import Export, ReadablePages
from quire.manager.fetches import Intake, Meetings, Prefetch, PrefetchState
from quire.manager.foreign import EnginePages, ForeignCopy, ForeignState
from quire.manager.lease import Lease, LoadState, PrefixMatch, Wish
from quire.manager.manager import CacheManager
from quire.manager.states import LeaseState
from quire.manager.store_control import StoreChange, StoreState

__all__ = [
    "Audit",
    "AuditState",
    "CacheEvent",
    "CacheManager",
    "Counters",
    "Decline",
    "EnginePages",
    "EventBatch",
    "EventKind",
    "Export",
    "Fit",
    "ForeignCopy",
    "ForeignState",
    "Intake",
    "Lease",
    "LeaseState",
    "LoadState",
    "Meetings",
    "Prefetch",
    "PrefetchState",
    "PrefixMatch",
    "ReadablePages",
    "StoreChange",
    "StoreState",
    "Way",
    "Wish",
]
