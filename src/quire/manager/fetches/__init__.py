"""What comes to the host from the store and from peers."""

from quire.manager.fetches.base import Intake, Meeting, Prefetch, PrefetchState, Stream
from quire.manager.fetches.fetches import Fetches
from quire.manager.fetches.meetings import Meetings

__all__ = ["Fetches", "Intake", "Meeting", "Meetings", "Prefetch", "PrefetchState", "Stream"]
