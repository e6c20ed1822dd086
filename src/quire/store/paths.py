"""Publishing pages that need each other, for stores that know nothing of paths themselves.

Knows the order: what needs a page that is not there is an ORPHAN, and what was sent beside a page
that did not land is taken back. How names are looked up, objects sent and taken back is the
store's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

from quire.errors import StoreError
from quire.store.base import NewObject, ObjectName
from quire.types import PageStatus

_OK, _ORPHAN = PageStatus.OK, PageStatus.ORPHAN


def put_paths(
    objects: Sequence[NewObject],
    *,
    contains: Callable[[Sequence[ObjectName]], list[bool]],
    send: Callable[[Sequence[NewObject]], Sequence[PageStatus]],
    take_back: Callable[[Sequence[ObjectName]], None],
) -> list[PageStatus]:
    """`send` gets all that may land, side by side; `contains` may raise OSError, StoreError."""
    try:
        lands = _lands(objects, contains)
    except TimeoutError:
        return [PageStatus.TIMEOUT] * len(objects)
    except (OSError, StoreError):
        return [PageStatus.FAILED] * len(objects)
    sent = iter(send(list(compress(objects, lands))))
    statuses: list[PageStatus] = []
    lost: set[ObjectName] = set()
    strays: list[ObjectName] = []
    for new, is_sent in zip(objects, lands, strict=True):
        status = next(sent) if is_sent else _ORPHAN
        if status is _OK and new.parent in lost:
            status = _ORPHAN
            strays.append(new.name)
        if status is not _OK:
            lost.add(new.name)
        statuses.append(status)
    if strays:
        take_back(strays)
    return statuses


def _lands(
    objects: Sequence[NewObject], contains: Callable[[Sequence[ObjectName]], list[bool]]
) -> list[bool]:
    """Of each: is the page that it needs there, or before it in this call?"""
    own = {new.name for new in objects}
    needed = dict.fromkeys(new.parent for new in objects if new.parent is not None)
    outside = [parent for parent in needed if parent not in own]
    there = set(compress(outside, contains(outside))) if outside else set()
    lands = []
    for new in objects:
        lands.append(new.parent is None or new.parent in there)
        if lands[-1]:
            there.add(new.name)
    return lands
