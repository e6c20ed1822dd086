"""Pages that need each other: which of them are new, and publishing them in stores that know
nothing of paths themselves.

Knows the order: what needs a page that is not there is an ORPHAN, and what was sent beside a page
that did not land is taken back. How names are looked up, objects sent and taken back is the
store's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

from quire.store.base import Making, NewObject, ObjectName, Pages, Part
from quire.types import PageKey, PageStatus

_OK, _ORPHAN = PageStatus.OK, PageStatus.ORPHAN

Contains = Callable[[Sequence[ObjectName]], list[bool]]


def look_up(
    objects: Sequence[NewObject], contains: Contains, making: Making | None = None
) -> list[PageStatus | None]:
    """Per object: OK, it is there; ORPHAN, what it needs is not, nor in this call; None: it is new,
    or lies behind one that is. Of a new one the store finds out by itself whether what it needs is
    there: only beside one that is there that is asked."""
    present, absent = _present(objects, contains, making)
    if not present:
        return [None] * len(objects)
    known: dict[ObjectName, PageStatus | None] = {}
    for new in objects:
        name, parent = new.name, new.parent
        there = known[parent] is not _ORPHAN if parent in known else parent not in absent
        known[name] = _ORPHAN if not there else _OK if name in present else None
    return [known[new.name] for new in objects]


def _present(
    objects: Sequence[NewObject], contains: Contains, making: Making | None
) -> tuple[set[ObjectName], set[ObjectName]]:
    """Those of them that are there; and what they need of which it is known that it is not. New
    pages come as the end of a path: where the first of them is not there, or the one before it was
    only just made, those behind it are not asked for."""
    own = {new.name for new in objects}
    heads = [new for new in objects if new.parent is None or new.parent not in own]
    if making is not None:
        heads = [new for new in heads if new.parent is None or not making.has_made(new.parent)]
    first = list(dict.fromkeys(new.name for new in heads))
    present = set(compress(first, contains(first))) if first else set()
    if not present:
        return set(), set()
    reached = present.copy()
    rest: list[ObjectName] = []
    for new in objects:
        if new.parent in reached:
            reached.add(new.name)
            rest.append(new.name)
    needed = [new.parent for new in heads if new.parent is not None and new.name in present]
    asked = list(dict.fromkeys([*needed, *rest]))
    there = set(compress(asked, contains(asked))) if asked else set()
    return present | there, set(needed) - there


def up_to_hole(there: bytes) -> bytes:
    """What lies behind a page that is not there does not count."""
    return there.partition(b"\0")[0].ljust(len(there), b"\0")


def touch_found(
    pages: Pages,
    part: Part,
    queries: Sequence[Sequence[PageKey]],
    found: Sequence[bytes],
    *,
    each: bool,
) -> None:
    """They are about to be fetched. Prompts of one group share their beginning: it is said once."""
    touched: set[PageKey] = set()
    for query, there in zip(queries, found, strict=True):
        hit = list(compress(query, there))
        if each:
            touched.update(hit)
        elif hit and hit[-1] not in touched:
            touched.update(hit)
            pages.touch(part, hit)
    if each and touched:
        pages.touch(part, list(touched), each=True)


class Sent(NamedTuple):
    statuses: Sequence[PageStatus]
    """Of the objects."""
    there: Sequence[bool | PageStatus]
    """Of the names: is it there? A status: why that is not known."""


def put_paths(
    objects: Sequence[NewObject],
    *,
    send: Callable[[Sequence[NewObject], Sequence[ObjectName]], Sent],
    take_back: Callable[[Sequence[ObjectName]], None],
) -> list[PageStatus]:
    """`send` gets what is to be published and what that needs from before, and does both at once:
    whoever publishes has looked, so that a page of which the one before it is gone is rare. Such a
    one is taken back."""
    lands, needed = _plan(objects)
    sent = send(list(compress(objects, lands)), needed)
    if sent.statuses.count(_OK) == len(objects) and all(there is True for there in sent.there):
        return list(sent.statuses)
    there = dict(zip(needed, sent.there, strict=True))
    published = iter(sent.statuses)
    statuses: list[PageStatus] = []
    lost: set[ObjectName] = set()
    strays: list[ObjectName] = []
    for new, is_sent in zip(objects, lands, strict=True):
        status = next(published) if is_sent else _ORPHAN
        parent_is = there.get(new.parent, True) if new.parent is not None else True
        if status is _OK and (parent_is is not True or new.parent in lost):
            status = parent_is if isinstance(parent_is, PageStatus) else _ORPHAN
            strays.append(new.name)
        if status is not _OK:
            lost.add(new.name)
        statuses.append(status)
    if strays:
        take_back(strays)
    return statuses


def _plan(objects: Sequence[NewObject]) -> tuple[list[bool], list[ObjectName]]:
    """Of each: may it be sent, or does it come before what it needs? And what must be there."""
    places = {objects[place].name: place for place in reversed(range(len(objects)))}
    lands: list[bool] = []
    outside: list[ObjectName] = []
    for place, new in enumerate(objects):
        before = None if new.parent is None else places.get(new.parent)
        if before is None and new.parent is not None:
            outside.append(new.parent)
        lands.append(before is None or (before < place and lands[before]))
    return lands, list(dict.fromkeys(outside))
