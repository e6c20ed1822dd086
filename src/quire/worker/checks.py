"""Does a command make sense? A leader may sit in another process, so every page number and length
is checked before any byte moves. Knows commands and the sizes of pools.
"""

from __future__ import annotations

from quire.messages import Backup, Disown, Fetch, Load, Probe, Serve, Touch, Write
from quire.types import PAGE_ID_BYTES, PAGE_KEY_BYTES, PageIds, num_pages, page_array
from quire.worker.copies import ComponentPools

PageCommand = Backup | Load | Write | Fetch | Serve | Probe | Touch | Disown


def makes_sense(command: PageCommand, pools: ComponentPools) -> bool:
    if isinstance(command, Probe | Touch | Disown):
        paths = command.queries if isinstance(command, Probe) else [command.keys]
        return all(len(keys) % PAGE_KEY_BYTES == 0 for keys in paths)
    return _within(command.host, pools.host.num_pages) and _is_whole(command, pools)


def _is_whole(command: Backup | Load | Write | Fetch | Serve, pools: ComponentPools) -> bool:
    """Is there for every host page what goes with it?"""
    count = num_pages(command.host)
    match command:
        case Backup() | Load():
            same = len(command.host) * len(pools.device.parts) == len(command.device)
            return same and _within(command.device, pools.device.num_pages)
        case Write():
            sound = all(run.makes_sense for run in command.runs)
            return sound and sum(run.num_pages for run in command.runs) == count
        case Fetch():
            if len(command.keys) == count * PAGE_KEY_BYTES:
                return command.source is None or command.source.first >= 0
            # A peer needs no keys: its grant says which pages these are.
            return command.source is not None and command.source.first >= 0 and not command.keys
        case Serve():
            return True


def _within(pages: PageIds, pool_pages: int) -> bool:
    """Are these whole page numbers, all of them inside the pool?"""
    if not pages:
        return True
    if len(pages) % PAGE_ID_BYTES:
        return False
    array = page_array(pages)
    return bool(array.min() >= 0 and array.max() < pool_pages)
