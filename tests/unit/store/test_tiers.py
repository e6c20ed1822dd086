"""Several stores as one: read from the faster, written by policy, each with its own faults."""

from __future__ import annotations

import errno
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from quire.errors import StoreError, StoreURLError
from quire.store import backlog
from quire.store.backlog import Backlog, PutCall
from quire.store.base import Part, WriteWhen
from quire.store.client import PageStore
from quire.store.faulty import FaultRates, FaultyStore
from quire.store.helpers import MAX_OPEN
from quire.store.memory import MemoryStore
from quire.store.opening import open_pages
from quire.store.tiers import StoreTier, Tiers
from quire.store.whereabouts import MAX_PAGES, Whereabouts
from quire.types import NO_PARENT, PageStatus

OK, MISS, ORPHAN, REJECTED = (
    PageStatus.OK,
    PageStatus.MISS,
    PageStatus.ORPHAN,
    PageStatus.REJECTED,
)
THROUGH, BACK, NEVER = WriteWhen


@pytest.fixture
def tiers():
    """Makes Tiers of (store, policy) pairs."""
    with ExitStack() as stack:

        def make(*members, **options):
            each = [
                StoreTier(store if isinstance(store, PageStore) else plain(store), write)
                for store, write in members
            ]
            made = Tiers(each, clock=time.monotonic, **options)
            stack.callback(made.close)
            return made

        yield make


def plain(store):
    return PageStore(store, clock=time.monotonic)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


class Stuck(MemoryStore):
    """Answers nothing until it is let go of."""

    def __init__(self):
        super().__init__()
        self.free = threading.Event()
        self.waits = False

    def contains(self, names, *, deadline):
        self.waits = True
        self.free.wait(30)
        return super().contains(names, deadline=deadline)

    def put(self, objects, *, deadline):
        self.free.wait(30)
        return super().put(objects, deadline=deadline)


class Full(MemoryStore):
    def put(self, objects, *, deadline):
        return [REJECTED] * len(objects)


class Broken(MemoryStore):
    def contains(self, names, *, deadline):
        raise OSError("gone")

    get = put = touch = contains


# ---- reading -------------------------------------------------------------------------------------


def test_what_any_of_them_has_is_found_and_comes(tiers, pages):
    fast, slow = MemoryStore(), MemoryStore()
    pages.put_path(plain(fast), 1, 2)
    pages.put_path(plain(slow), 1, 2, 3, 4)
    both = tiers((fast, THROUGH), (slow, THROUGH))
    assert pages.usable(both, 1, 2, 3, 4, 5) == 4
    assert pages.get(both, 1, 2, 3, 4, 5) == [OK] * 4 + [MISS]
    counted = both.counters()
    assert counted["store0.read:ok"] == 2
    assert counted["store1.read:ok"] == 2
    assert counted["read:ok"] == 4
    assert all(health.read_us_per_page is not None for health in both.health())
    assert not any("us_per_page" in name for name in counted), "it is not counted, nor added up"


def test_a_hole_in_one_is_filled_by_the_other(tiers, pages):
    """As when a bucket has deleted what is oldest, and a pool what was not used for long."""
    fast, slow = MemoryStore(), MemoryStore()
    pages.put(plain(fast), 1, 2, 5)
    pages.put(plain(slow), 3, 4, 7)
    both = tiers((fast, THROUGH), (slow, THROUGH))
    assert pages.usable(both, 1, 2, 3, 4, 5, 6, 7) == 5
    assert pages.get(both, 1, 2, 3, 4, 5) == [OK] * 5


def test_without_having_asked_every_one_is_looked_into(tiers, pages):
    fast, slow = MemoryStore(), MemoryStore()
    pages.put(plain(slow), 1)
    assert pages.get(tiers((fast, THROUGH), (slow, THROUGH)), 1, 2) == [OK, MISS]


def test_what_is_damaged_in_one_comes_from_the_other_c17(tiers, pages):
    fast, slow = MemoryStore(), MemoryStore()
    for store in (fast, slow):
        pages.put(plain(store), 1)
    (item,) = fast._objects.values()
    item.data = item.data[:-1] + b"x"
    both = tiers((fast, THROUGH), (slow, THROUGH))
    assert pages.get(both, 1) == [OK]
    assert not fast._objects
    assert len(slow._objects) == 1


def test_a_store_that_fails_costs_nothing_but_its_own_pages(tiers, pages):
    slow = MemoryStore()
    pages.put_path(plain(slow), 1, 2)
    both = tiers((Broken(), THROUGH), (slow, THROUGH))

    def is_open() -> bool:
        assert pages.usable(both, 1, 2) == 2
        assert pages.get(both, 1, 2) == [OK, OK]
        return not both.health()[0].answers

    until(is_open)
    assert both.health()[1].answers


def test_nobody_waits_for_a_slow_store_when_another_has_it_all(tiers, pages):
    fast, stuck = MemoryStore(), Stuck()
    pages.put_path(plain(fast), 1, 2)
    both = tiers((fast, THROUGH), (stuck, NEVER))
    found = both.find(pages.part, [pages.keys(1, 2)], deadline=time.monotonic() + 600)
    assert found == [b"\1\1"]
    stuck.free.set()


def test_a_store_that_does_not_answer_in_time_is_left(tiers, pages):
    fast, stuck = MemoryStore(), Stuck()
    pages.put_path(plain(fast), 1)
    both = tiers((fast, THROUGH), (stuck, NEVER))
    found = both.find(pages.part, [pages.keys(1, 2)], deadline=time.monotonic() + 0.2)
    assert found == [b"\1\0"]
    assert both.counters()["declined:late"] == 1
    stuck.free.set()


def test_questions_to_a_store_that_hangs_for_ever_do_not_pile_up(tiers, pages):
    """Each has its time and is left; what it asked for must not stay in memory."""
    fast, stuck = MemoryStore(), Stuck()
    both = tiers((fast, THROUGH), (stuck, NEVER))
    for _ in range(2 * MAX_OPEN):
        both.find(pages.part, [pages.keys(1)], deadline=time.monotonic() + 0.001)
    assert both._helpers[1].num_open <= MAX_OPEN
    assert pages.put(both, 1) == [OK]
    assert pages.get(both, 1) == [OK]
    stuck.free.set()
    until(lambda: both._helpers[1].num_open == 0)


PART = Part("full", 0, 1, b"f" * 32, 4096)


def test_the_one_that_proves_faster_is_read_first():
    where = Whereabouts(2)
    assert where.order() == [0, 1]
    where.measured(0, 10, 5.0)
    assert where.order() == [0, 1]
    where.measured(1, 10, 1.0)
    assert where.order() == [1, 0]
    where.learn(PART, [b"a", b"b"], b"\1\0", 0)
    where.learn(PART, [b"a"], b"\1", 1)
    assert where.candidates(PART, b"a", where.order()) == [1, 0]
    assert where.candidates(PART, b"b", where.order()) == [1]
    assert where.candidates(PART, b"c", where.order()) == [1, 0]


def test_a_page_takes_as_long_as_the_store_that_has_it():
    where = Whereabouts(2)
    where.learn(PART, [b"fast", b"both"], b"\1\1", 0)
    where.learn(PART, [b"slow", b"both"], b"\1\1", 1)
    where.learn(PART, [b"slow"], b"\0", 0)
    assert where.pace(PART, [b"fast"]) == 1.0  # nothing was read so far
    where.measured(0, 30, 30 * 0.01)
    assert where.pace(PART, [b"slow"]) == 1.0  # nor of that one
    where.measured(1, 10, 10 * 0.09)
    mean_s = (30 * 0.01 + 10 * 0.09) / 40
    assert where.pace(PART, [b"fast"]) == pytest.approx(0.01 / mean_s)
    assert where.pace(PART, [b"slow"]) == pytest.approx(0.09 / mean_s)
    assert where.pace(PART, [b"slow", b"both"]) == pytest.approx(0.05 / mean_s)
    assert where.pace(PART, []) == 1.0


def test_what_was_said_of_pages_that_are_written_since_is_forgotten():
    where = Whereabouts(1)
    where.learn(PART, [b"a", b"b"], b"\0\0", 0)
    where.forget(PART, [b"a", b"c"])
    assert where.candidates(PART, b"a", where.order()) == [0]
    assert where.candidates(PART, b"b", where.order()) == []


def test_what_is_known_of_pages_is_bounded():
    where = Whereabouts(1)
    keys = [n.to_bytes(4, "big") for n in range(MAX_PAGES + 10)]
    where.learn(PART, keys, bytes(len(keys)), 0)
    assert len(where._said) == MAX_PAGES


# ---- writing -------------------------------------------------------------------------------------


def test_through_means_all_of_them_have_it(tiers, pages):
    fast, slow = MemoryStore(), MemoryStore()
    both = tiers((fast, THROUGH), (slow, THROUGH))
    assert pages.put_path(both, 1, 2) == [OK, OK]
    assert len(fast._objects) == len(slow._objects) == 2


def test_back_means_later_and_never_means_never(tiers, pages):
    fast, slow, read_only = MemoryStore(), Stuck(), MemoryStore()
    all_three = tiers((fast, THROUGH), (slow, BACK), (read_only, NEVER))
    assert pages.put_path(all_three, 1, 2) == [OK, OK]
    assert not slow._objects
    slow.free.set()
    until(lambda: len(slow._objects) == 2)
    assert not read_only._objects
    until(lambda: all_three.counters().get("store1.back_pages") == 2)


class Holding(MemoryStore):
    """Stands still before and after it publishes, and before it lets go of what it has."""

    def __init__(self):
        super().__init__()
        self.gates = [(threading.Event(), threading.Event()) for _ in range(3)]

    def put(self, objects, *, deadline):
        self._pass(0)
        statuses = super().put(objects, deadline=deadline)
        self._pass(1)
        return statuses

    def quarantine(self, name):
        if self.contains([name], deadline=0.0) == [True]:
            self._pass(2)
        return super().quarantine(name)

    def _pass(self, gate):
        has_come, may_go = self.gates[gate]
        has_come.set()
        assert may_go.wait(30)

    def wait(self, gate):
        assert self.gates[gate][0].wait(30)

    def let_on(self, gate):
        self.gates[gate][1].set()


@pytest.mark.parametrize("write", [THROUGH, BACK])
def test_a_page_disowned_while_it_is_written_is_a_miss_until_it_is_taken_out(tiers, pages, write):
    slow = Holding()
    both = tiers((slow, write), (MemoryStore(), NEVER))
    writer = threading.Thread(target=pages.put, args=(both, 1))
    writer.start()
    slow.wait(0)
    both.disown(pages.part, pages.keys(1))()
    writes = 1 if write is THROUGH else 0
    until(lambda: both._helpers[0].num_open == writes)  # what would take it out has run
    for gate in (1, 2):
        slow.let_on(gate - 1)
        slow.wait(gate)  # it is there, and wrong
        assert slow._objects
        assert found(both, pages) == [b"\0"]
        assert pages.get(both, 1) == [MISS]
    slow.let_on(2)
    writer.join()
    until(lambda: not slow._objects)
    pages.put(both, 1)
    until(lambda: found(both, pages) == [b"\1"])
    assert pages.get(both, 1) == [OK]


def found(store, pages):
    return store.find(pages.part, [pages.keys(1)], deadline=time.monotonic() + 30)


def test_a_disowned_page_that_waits_is_not_written_and_one_under_way_is_taken_out(tiers, pages):
    fast, slow = MemoryStore(), Stuck()
    both = tiers((fast, THROUGH), (slow, BACK))
    for n in (1, 2, 3):
        assert pages.put(both, n) == [OK]
    until(lambda: slow.waits)  # with the first of them
    both.disown(pages.part, pages.keys(1, 2))()
    slow.free.set()
    until(lambda: len(fast._objects) == len(slow._objects) == 1)
    until(lambda: both.counters().get("store1.written:rejected") == 2)
    assert pages.get(both, 1, 2, 3) == [MISS, MISS, OK]
    both.close()
    assert len(slow._objects) == 1


def test_what_waits_to_be_written_is_bounded_and_counted(tiers, pages):
    fast, slow = MemoryStore(), Stuck()
    both = tiers((fast, THROUGH), (slow, BACK), backlog_bytes=3 * pages.part.page_bytes)
    for n in range(1, 9):
        assert pages.put(both, n) == [OK]
    counted = both.counters()
    assert counted["store1.back_pages"] == 3
    assert counted["store1.back_dropped_pages"] == 5
    slow.free.set()


def test_what_there_is_no_memory_to_copy_is_not_written_later_and_counted(
    tiers, pages, monkeypatch
):
    fast, slow = MemoryStore(), MemoryStore()
    both = tiers((fast, THROUGH), (slow, BACK), backlog_bytes=pages.part.page_bytes)

    def no_memory(page):
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(backlog, "_copy", no_memory)
        assert pages.put(both, 1) == [OK]
    assert both.counters()["store1.back_dropped_pages"] == 1
    assert pages.put(both, 2) == [OK]
    until(lambda: len(slow._objects) == 1)  # its room was given back
    assert len(fast._objects) == 2


def test_nobody_is_given_the_pages_while_a_store_writes_them_whatever_another_fails_at(
    tiers, pages, monkeypatch
):
    """Else what is there next is stored under their keys, sealed as right."""
    stuck, other = Stuck(), MemoryStore()
    both = tiers((stuck, THROUGH), (other, BACK))
    page = pages.full(1)

    def fail(*_):
        until(lambda: stuck.waits)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Backlog, "add", fail)

    def put_and_use_again():
        with suppress(RuntimeError):
            both.put(pages.part, pages.keys(1), [page], deadline=time.monotonic() + 60)
        page[:] = pages.full(2)

    writer = threading.Thread(target=put_and_use_again)
    writer.start()
    until(lambda: stuck.waits)
    writer.join(0.2)
    stuck.free.set()
    writer.join()
    until(lambda: stuck._objects)
    assert pages.get(plain(stuck), 1) == [OK]


def test_closing_writes_what_waits(tiers, pages):
    slow = MemoryStore()
    both = tiers((MemoryStore(), THROUGH), (slow, BACK))
    pages.put_path(both, 1, 2, 3)
    both.close()
    assert len(slow._objects) == 3


def test_one_that_is_full_does_not_keep_the_others_from_it(tiers, pages):
    slow = MemoryStore()
    both = tiers((Full(), THROUGH), (slow, THROUGH))
    assert pages.put_path(both, 1, 2) == [OK, OK]
    assert pages.put_path(both, 3, after=2) == [OK]  # the full one lacks 2, and is not listened to
    assert len(slow._objects) == 3


@pytest.mark.parametrize("write", [THROUGH, BACK])
def test_a_store_that_came_back_empty_has_the_path_written_again(tiers, pages, write):
    """As the leader does: what is ORPHAN is written again with all before it."""
    fast, slow = MemoryStore(), MemoryStore()
    both = tiers((slow, THROUGH), (fast, write))
    assert pages.put_path(both, 1, 2) == [OK, OK]
    until(lambda: len(fast._objects) == 2)
    fast.clear()
    answers = [pages.put_path(both, 3, after=2)]
    until(lambda: both.counters().get("store1.written:orphan") == 1)
    answers.append(pages.put_path(both, 4, after=3))
    assert [ORPHAN] in answers
    assert pages.put_path(both, 1, 2, 3, 4) == [OK] * 4
    until(lambda: len(fast._objects) == 4)


def test_only_readers_take_nothing(tiers, pages):
    store = MemoryStore()
    pages.put(plain(store), 1)
    only = tiers((store, NEVER))
    assert pages.put(only, 2) == [REJECTED]
    assert pages.get(only, 1) == [OK]


def test_clearing_leaves_what_is_only_read(tiers, pages):
    mine, theirs = MemoryStore(), MemoryStore()
    for store in (mine, theirs):
        pages.put(plain(store), 1)
    tiers((mine, THROUGH), (theirs, NEVER)).clear()
    assert not mine._objects
    assert theirs._objects


def test_clearing_tells_all_and_then_says_that_one_failed(tiers, pages):
    class Stays(MemoryStore):
        def clear(self, *, wait=False):
            raise StoreError("it stays")

    other = MemoryStore()
    pages.put(plain(other), 1)
    with pytest.raises(StoreError, match="it stays"):
        tiers((Stays(), THROUGH), (other, THROUGH)).clear()
    assert not other._objects


def test_a_page_that_its_backlog_turned_away_is_told_once(pages):
    store = plain(MemoryStore())
    backlog = Backlog(store, clock=time.monotonic, max_bytes=1 << 20)
    call = PutCall(pages.part, pages.keys(2), [pages.full(2)], pages.keys(1), [], None)
    assert backlog.add(call)
    backlog.close(30)
    assert backlog.misses(pages.key(2))
    assert not backlog.misses(pages.key(2))
    assert not backlog.add(call._replace(parents=[NO_PARENT]))


# ---- under load ----------------------------------------------------------------------------------


def test_threads_and_faults_never_bring_a_wrong_page(tiers, pages):
    """Readers and writers at once, on stores that drop, damage and raise."""
    faults = FaultRates(drop=0.1, corrupt=0.1, truncate=0.05, raise_=0.05)
    shared = [FaultyStore(MemoryStore(), faults, seed=seed) for seed in (1, 2)]
    both = tiers((shared[0], THROUGH), (shared[1], BACK))
    wrong = []

    def work(first):
        for n in range(first, first + 40):
            try:
                pages.put(both, n)
                pages.usable(both, n)
                pages.get(both, n, n - 1)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(100 * i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- by URL --------------------------------------------------------------------------------------


def test_urls_with_blanks_between_them_are_tiers(pages, tmp_path):
    text = f"memory://?max=1MiB&write=through file://{tmp_path}/store?write=back&max=1GiB"
    opened = open_pages(text, clock=time.monotonic)
    assert isinstance(opened, Tiers)
    assert pages.put(opened, 1) == [OK]
    opened.close()
    again = open_pages(f"file://{tmp_path}/store", clock=time.monotonic)
    assert isinstance(again, PageStore)
    assert pages.get(again, 1) == [OK]
    again.close()


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("memory://?write=sometimes", "through, back, never"),
        ("memory://?codec=rot13", "none, zstd, lz4"),
        ("memory:// nothing", "not a store URL"),
        ("memory:// faulty://", "names no store"),
    ],
)
def test_a_url_that_says_nothing_sensible_is_one_sentence(url, word):
    with pytest.raises(StoreURLError, match=word) as caught:
        open_pages(url, clock=time.monotonic)
    assert "\n" not in str(caught.value)


def test_when_the_second_cannot_be_opened_the_first_is_closed(monkeypatch):
    closed = []

    def close(store):
        closed.append(store)

    monkeypatch.setattr(MemoryStore, "close", close)
    with pytest.raises(StoreURLError):
        open_pages("memory:// memory://?max=0", clock=time.monotonic)
    assert len(closed) == 1
