"""Publishing pages that need each other, in a store that knows nothing of paths."""

from __future__ import annotations

import pytest

from quire.store.base import Blob, NewObject
from quire.store.paths import Sent, look_up, put_paths
from quire.testing.stores import name
from quire.types import PageStatus

OK, FAILED, ORPHAN, REJECTED, TIMEOUT = (
    PageStatus.OK,
    PageStatus.FAILED,
    PageStatus.ORPHAN,
    PageStatus.REJECTED,
    PageStatus.TIMEOUT,
)
NOTHING = Blob(memoryview(b""), memoryview(b""))


def news_of(*path: tuple[int, int | None]) -> list[NewObject]:
    return [
        NewObject(name(n), NOTHING, None if parent is None else name(parent), 1)
        for n, parent in path
    ]


class Backend:
    """Has some pages; `says`: what it says of others, instead of taking them."""

    def __init__(self, *there: int, says: dict[int, PageStatus] | None = None) -> None:
        self.there = {name(n) for n in there}
        self._says = {name(n): status for n, status in (says or {}).items()}
        self.num_sent = 0

    def put(self, *path: tuple[int, int | None]) -> list[PageStatus]:
        return put_paths(news_of(*path), send=self._send, take_back=self.there.difference_update)

    def _send(self, news, needed):
        there = [self._says.get(n, n in self.there) for n in needed]
        statuses = [self._says.get(new.name, OK) for new in news]
        self.num_sent += len(news)
        self.there |= {new.name for new, s in zip(news, statuses, strict=True) if s is OK}
        return Sent(statuses, there)

    def has(self, *numbers: int) -> list[bool]:
        return [name(n) in self.there for n in numbers]


def test_what_is_needed_may_be_there_or_come_along():
    backend = Backend(1)
    assert backend.put((2, 1), (3, 2), (7, None)) == [OK] * 3
    assert backend.has(1, 2, 3, 7) == [True] * 4


def test_what_needs_a_page_that_is_gone_is_taken_back_with_all_behind_it():
    backend = Backend()
    assert backend.put((2, 1), (3, 2), (7, None)) == [ORPHAN, ORPHAN, OK]
    assert backend.has(2, 3, 7) == [False, False, True]


@pytest.mark.parametrize("status", [FAILED, TIMEOUT])
def test_when_it_is_not_known_whether_it_is_there_nothing_is_kept(status):
    backend = Backend(says={1: status})
    assert backend.put((2, 1), (3, 2)) == [status, ORPHAN]
    assert backend.has(2, 3) == [False, False]


def test_what_comes_behind_a_page_that_was_turned_away_is_taken_back():
    backend = Backend(1, says={2: REJECTED})
    assert backend.put((2, 1), (3, 2), (4, 3)) == [REJECTED, ORPHAN, ORPHAN]
    assert backend.has(1, 2, 3, 4) == [True, False, False, False]


def test_a_page_before_the_one_it_needs_is_not_sent():
    backend = Backend()
    assert backend.put((2, 1), (1, None)) == [ORPHAN, OK]
    assert backend.num_sent == 1


@pytest.mark.parametrize(
    ("there", "expected", "num_asked"),
    [
        ([], [None] * 3, 1),  # new: one question about one page, whatever it needs
        ([1], [None] * 3, 1),
        ([1, 2], [OK, None, None], 4),
        ([1, 2, 3, 4], [OK] * 3, 4),
        ([1, 2, 4], [OK, None, OK], 4),
        ([2, 3], [ORPHAN] * 3, 4),
    ],
)
def test_who_looks_before_writing_asks_no_more_than_it_takes(there, expected, num_asked):
    asked = []

    def contains(names):
        asked.extend(names)
        return [n in {name(each) for each in there} for n in names]

    assert look_up(news_of((2, 1), (3, 2), (4, 3)), contains) == expected
    assert len(asked) == num_asked


class Made:
    """A store that has just made one page."""

    def __init__(self, number):
        self.number = number

    def has_made(self, made):
        return made == name(self.number)


def test_what_follows_a_page_that_was_just_made_is_not_asked_for():
    def contains(names):
        assert names == [name(8)]  # the other path goes on from somewhere else
        return [True]

    news = news_of((2, 1), (3, 2), (8, None))
    assert look_up(news, contains, Made(1)) == [None, None, OK]
