"""PagesSuite: what pages in and out of stores promise, however many there are and however packed.

    from quire.testing.pages import PagesSuite

    class TestMine(PagesSuite):
        def open(self):
            return open_pages("mine://a?codec=zstd mine://b?write=back", clock=time.monotonic)

The rules of a store itself are StoreSuite's (stores.py); these are of what stands on it: sealed and
verified, in tiers, packed. Needs no fixture and no network.
"""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from unittest import SkipTest

from quire.store.base import HEADER_BYTES, Pages, Part
from quire.types import NO_PARENT, PageKey, PageStatus

OK, MISS, ORPHAN = PageStatus.OK, PageStatus.MISS, PageStatus.ORPHAN
_PATIENCE_S = 30.0
_TRIES = 4


class PagesSuite:
    part = Part("full", 0, 1, b"m" * 32, 8 * HEADER_BYTES)
    is_shared = True
    """Is what one has put into it there for who opens it next?"""

    def open(self) -> Pages:
        """Empty the first time in a test; the same content each time it is opened."""
        raise NotImplementedError

    # ---- what goes in comes out -----------------------------------------------------------------

    def test_pages_come_back_byte_for_byte(self) -> None:
        """Also what can be packed, and what cannot."""
        with self._opened() as pages:
            assert self._put(pages, *range(40)) == [OK] * 40
            assert self._get(pages, *reversed(range(40))) == [OK] * 40

    def test_what_was_never_put_is_a_miss_and_the_others_come(self) -> None:
        with self._opened() as pages:
            self._put(pages, 1, 3)
            assert self._get(pages, 1, 2, 3) == [OK, MISS, OK]

    def test_of_a_path_what_lies_before_a_hole_is_found(self) -> None:
        with self._opened() as pages:
            self._put(pages, 1, 2, 4)
            queries = [keys(1, 2, 3, 4), keys(4), keys(9, 1), []]
            found = pages.find(self.part, queries, deadline=soon())
            assert found == [b"\1\1\0\0", b"\1", b"\0\0", b""]
            (each,) = pages.find(self.part, [keys(1, 2, 3, 4)], deadline=soon(), each=True)
            assert each == b"\1\1\0\1"

    def test_who_opens_it_next_finds_it(self) -> None:
        if not self.is_shared:
            raise SkipTest("what is in these stores is there for one opener only")
        with self._opened() as pages:
            self._put_path(pages, 1, 2, 3)
        with self._opened() as pages:
            assert self._get(pages, 1, 2, 3) == [OK] * 3

    # ---- whose they are -------------------------------------------------------------------------

    def test_pages_of_another_model_are_misses_and_stay(self) -> None:
        with self._opened() as pages:
            self._put(pages, 1)
            for size in (self.part.page_bytes, HEADER_BYTES, 2 * self.part.page_bytes):
                other = replace(self.part, fingerprint=b"o" * 32, page_bytes=size)
                assert self._get(pages, 1, part=other) == [MISS]
                assert self._get(pages, 1) == [OK]

    def test_other_components_and_shards_are_other_pages(self) -> None:
        with self._opened() as pages:
            self._put(pages, 1)
            for other in (
                replace(self.part, component="window"),
                replace(self.part, shard=1, num_shards=2),
            ):
                assert self._get(pages, 1, part=other) == [MISS]
                assert pages.find(other, [keys(1)], deadline=soon()) == [b"\0"]

    # ---- paths ----------------------------------------------------------------------------------

    def test_a_page_without_the_one_it_needs_is_an_orphan(self) -> None:
        """Then its whole path is written; again, while a store that is written later says so."""
        with self._opened() as pages:
            assert self._put_path(pages, 2, 3, after=1) == [ORPHAN] * 2
            assert self._get(pages, 2, 3) == [MISS] * 2
            for _ in range(_TRIES):
                self._settled(pages)
                statuses = self._put_path(pages, 1, 2, 3, 4)
                if ORPHAN not in statuses:
                    break
            assert statuses == [OK] * 4
            assert self._get(pages, 1, 2, 3, 4) == [OK] * 4

    def test_using_pages_changes_none(self) -> None:
        with self._opened() as pages:
            self._put_path(pages, 1, 2)
            pages.touch(self.part, keys(1, 2, 9))
            pages.touch(self.part, keys(2, 9), each=True)
            assert self._get(pages, 1, 2, 9) == [OK, OK, MISS]

    # ---- time, and the end ----------------------------------------------------------------------

    def test_a_call_whose_time_is_over_ends_and_blames_nobody(self) -> None:
        with self._opened() as pages:
            self._put(pages, 1)
            over = time.monotonic() - 1
            assert self._get(pages, 1, deadline=over) != [OK]
            self._put(pages, 2, deadline=over)  # OK where it is written later
            assert self._get(pages, 1) == [OK]

    def test_what_was_cleared_is_gone_and_it_can_be_filled_again(self) -> None:
        with self._opened() as pages:
            self._put_path(pages, 1, 2, 3)
            self._settled(pages)
            pages.clear()
            assert self._get(pages, 1, 2, 3) == [MISS] * 3
            assert self._put_path(pages, 1, 2) == [OK, OK]
            assert self._get(pages, 1, 2) == [OK, OK]

    def test_after_the_end_it_declines_and_raises_nothing(self) -> None:
        with self._opened() as pages:
            self._put(pages, 1)
        assert self._get(pages, 1) != [OK]
        assert self._put(pages, 2) != [OK]
        assert pages.find(self.part, [keys(1)], deadline=soon()) == [b"\0"]

    # ---- many at once, and figures --------------------------------------------------------------

    def test_threads_do_not_get_each_others_pages(self) -> None:
        with self._opened() as pages:
            wrong: list[int] = []

            def work(first: int) -> None:
                for n in range(first, first + 12):
                    try:
                        assert self._put(pages, n) == [OK]
                        assert self._get(pages, n) == [OK]
                    except AssertionError:
                        wrong.append(n)

            threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong

    def test_what_was_moved_is_counted(self) -> None:
        with self._opened() as pages:
            self._put(pages, 1, 2)
            self._get(pages, 1, 2, 3)
            counts = pages.counters()
            assert counts["read:ok"] == counts["written:ok"] == 2
            assert counts["read_bytes"] == counts["written_bytes"] == 2 * self.part.page_bytes
            assert counts["read:miss"] == 1
            assert pages.pace(self.part, keys(1, 2)) > 0

    def test_how_each_store_stands_is_said(self) -> None:
        with self._opened() as pages:
            self._put(pages, 1)
            health = pages.health()
            assert health
            assert all(each.answers for each in health)

    # ---- inside ---------------------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[Pages]:
        with closing(self.open()) as pages:
            yield pages

    def _page(self, n: int) -> memoryview:
        """Every other one can be packed."""
        page = memoryview(mmap.mmap(-1, self.part.page_bytes))
        noise = random.Random(n).randbytes(page.nbytes)
        page[:] = noise if n % 2 else noise[:64] * (page.nbytes // 64)
        return page

    def _put(self, pages: Pages, *numbers: int, deadline: float | None = None) -> list[PageStatus]:
        content = [self._page(n) for n in numbers]
        until = soon() if deadline is None else deadline
        return pages.put(self.part, keys(*numbers), content, deadline=until)

    def _put_path(self, pages: Pages, *numbers: int, after: int | None = None) -> list[PageStatus]:
        before = NO_PARENT if after is None else key(after)
        content = [self._page(n) for n in numbers]
        parents = [before, *keys(*numbers[:-1])]
        return pages.put(self.part, keys(*numbers), content, parents=parents, deadline=soon())

    def _get(
        self,
        pages: Pages,
        *numbers: int,
        part: Part | None = None,
        deadline: float | None = None,
    ) -> Sequence[PageStatus]:
        """Whatever is OK must be right."""
        part = part or self.part
        into = [memoryview(mmap.mmap(-1, part.page_bytes)) for _ in numbers]
        until = soon() if deadline is None else deadline
        statuses = pages.get(part, keys(*numbers), into, deadline=until)
        for n, status, page in zip(numbers, statuses, into, strict=True):
            assert status is not OK or page == self._page(n), f"page {n} has other bytes"
        return statuses

    def _settled(self, pages: Pages) -> None:
        """What is written later has been written: nothing of it comes after a clearing."""
        until_s = time.monotonic() + _PATIENCE_S

        def waits() -> bool:
            counts = pages.counters()
            later = [name.removesuffix("back_pages") for name in counts if "back_pages" in name]
            return any(
                sum(n for name, n in counts.items() if name.startswith(f"{at}written:"))
                < counts[f"{at}back_pages"]
                for at in later
            )

        while waits() and time.monotonic() < until_s:
            time.sleep(0.01)


def key(n: int) -> PageKey:
    return PageKey((n + 1).to_bytes(4, "big") * 8)


def keys(*numbers: int) -> list[PageKey]:
    return [key(n) for n in numbers]


def soon() -> float:
    return time.monotonic() + 60
