"""PageStore on small stores that behave as each test needs."""

from __future__ import annotations

import threading

import pytest

from quire.store import Breaker, Mismatch
from quire.store import client as client_module
from quire.store.base import MAX_OBJECTS, Landings
from quire.store.codec import check, object_name
from quire.store.faulty import FaultRates, FaultyStore
from quire.store.memory import MemoryStore
from quire.types import PageStatus
from unit.store.conftest import counted

OK, MISS, CORRUPT, FAILED, TIMEOUT, CANCELLED, REJECTED, ORPHAN = PageStatus


def test_pages_come_back_in_place(client, pages, deadline):
    store = client(MemoryStore())
    numbers = range(40)
    assert pages.put(store, *numbers, deadline=deadline) == [OK] * 40
    assert pages.get(store, *numbers, 99, deadline=deadline) == [OK] * 40 + [MISS]
    assert counted(store, "read") == {"ok": 40, "miss": 1}
    counters = store.counters()
    assert counters["read_bytes"] == counters["written_bytes"] == 40 * pages.part.page_bytes


def test_no_threads_is_enough(client, pages, deadline):
    store = client(MemoryStore())
    assert pages.put(store, *range(9), deadline=deadline) == [OK] * 9
    assert pages.get(store, *range(9), deadline=deadline) == [OK] * 9


def test_empty_batches_are_fine(client, pages, deadline):
    store = client(MemoryStore())
    assert pages.put(store, deadline=deadline) == []
    assert pages.get(store, deadline=deadline) == []
    assert store.find(pages.part, [[], []], deadline=deadline) == [b"", b""]


def test_known_pages_are_skipped(client, pages, deadline):
    store = client(MemoryStore())
    pages.put(store, 1, 2, deadline=deadline)
    assert pages.put(store, 1, 2, 3, deadline=deadline) == [OK, OK, OK]
    assert store.counters()["skipped_pages"] == 2


class Asked(MemoryStore):
    """Remembers what it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def contains(self, names, *, deadline):
        self.asked.append([name.key[0] for name in names])
        return super().contains(names, deadline=deadline)


def test_of_a_new_path_only_the_first_page_is_asked_for(client, pages):
    backend = Asked()
    store = client(backend)
    assert pages.put_path(store, 1, 2, 3) == [OK] * 3
    assert backend.asked == [[1]]
    assert pages.put_path(store, 4, 5, 6, after=3) == [OK] * 3
    assert backend.asked[1:] == [[4]]  # what it needs, the store looks for when it has it


def test_what_is_there_of_a_path_is_skipped_up_to_a_hole_which_is_filled(client, pages):
    backend = Asked()
    store = client(backend)
    pages.put_path(store, 1, 2, 3, 4)
    backend._drop(store_name(pages, 3))
    assert pages.put_path(store, 1, 2, 3, 4) == [OK] * 4
    assert backend.asked[1:] == [[1], [2, 3, 4]]
    assert store.counters()["skipped_pages"] == 3
    assert pages.usable(store, 1, 2, 3, 4) == 4


def test_a_path_without_its_beginning_is_written_again(client, pages):
    backend = Asked()
    store = client(backend)
    pages.put_path(store, 1, 2, 3)
    backend._drop(store_name(pages, 1))
    assert pages.put_path(store, 1, 2, 3) == [OK] * 3
    assert store.counters()["skipped_pages"] == 0
    assert pages.put_path(store, 8, 9, after=7) == [ORPHAN] * 2


def store_name(pages, n):
    return object_name(pages.part, pages.key(n))


class Tells(MemoryStore):
    """Says of each object that it has landed, and may lay hands on it afterwards."""

    def __init__(self, *, damages=False):
        super().__init__()
        self._damages = damages

    def get(self, names, into, *, deadline):
        statuses = super().get(names, into, deadline=deadline)
        for i, status in enumerate(statuses):
            if self._damages:
                into[i].payload[7] ^= 1
            if status is OK:
                into.landed(i)
        return statuses


def test_a_page_may_be_checked_when_it_lands(client, pages, monkeypatch):
    checks = []
    monkeypatch.setattr(client_module, "check", lambda *args: checks.append(1) or check(*args))
    store = client(Tells())
    pages.put(store, 1, 2)
    assert pages.get(store, 1, 2, 3) == [OK, OK, MISS]
    assert len(checks) == 2  # and not once more


def test_a_page_that_lands_damaged_is_found_out(client, pages):
    store = client(Tells(damages=True))
    pages.put(store, 1, 2)
    assert pages.get(store, 1, 2) == [CORRUPT, CORRUPT]
    assert counted(store, "mismatch") == {"checksum": 2}


def test_damage_done_behind_one_that_tells_is_found_out(client, pages):
    """A wrapper hands on where pages go, and not that they have landed."""
    store = client(FaultyStore(Tells(), FaultRates(corrupt=1.0), seed=1))
    store._store.inner.get = lambda names, into, deadline: MemoryStore.get(
        store._store.inner, names, refused(into), deadline=deadline
    )
    pages.put(store, 1)
    assert pages.get(store, 1) != [OK]


def refused(into):
    assert not isinstance(into, Landings)
    return into


def test_probe_counts_leading_pages_per_query_c16(client, pages, deadline):
    """A page lost in the middle yields the prefix before it."""
    store = client(MemoryStore())
    pages.put(store, 1, 2, 4, deadline=deadline)
    queries = [pages.keys(1, 2, 3, 4), pages.keys(4), pages.keys(9, 1)]
    assert store.find(pages.part, queries, deadline=deadline) == [b"\1\1\0\0", b"\1", b"\0\0"]


def test_wrong_page_length_is_an_error_of_the_caller(client, pages, deadline):
    with pytest.raises(ValueError, match="one page of"):
        client(MemoryStore()).get(
            pages.part, pages.keys(1), [pages.empty()[:4096]], deadline=deadline
        )


def test_passed_deadline_is_a_timeout_that_does_not_blame_the_store_c17(client, pages, clock):
    store = client(MemoryStore(), clock=clock, breaker=Breaker(clock, max_failures=1))
    assert pages.get(store, 1, 2, deadline=clock.now) == [TIMEOUT, TIMEOUT]
    assert store.health()[0].answers


def test_deadline_is_checked_between_calls_of_the_store_c17(client, pages, clock):
    class Ticking(MemoryStore):
        def get(self, *args, **options):
            clock.now += 1
            return super().get(*args, **options)

    store = client(Ticking(), clock=clock)
    statuses = pages.get(store, *range(3 * MAX_OBJECTS), deadline=clock.now + 2)
    assert statuses == [MISS] * 2 * MAX_OBJECTS + [TIMEOUT] * MAX_OBJECTS


# ---- faults: each ends as a miss with a counted reason, and later requests work --------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", ["drop", "truncate", "corrupt", "raise_", "delay"])
def test_every_fault_ends_as_a_counted_miss_c17(client, pages, deadline, fault, seed):
    faulty = FaultyStore(
        MemoryStore(), FaultRates(**{fault: 0.3, "delay_s": 0.0}), seed=seed, sleep=lambda s: None
    )
    store = client(faulty, breaker=Breaker(lambda: 0.0, max_failures=1000))
    numbers = range(240)
    pages.put(store, *numbers, deadline=deadline)
    statuses = pages.get(store, *numbers, deadline=deadline)
    reasons = sum(counted(store, "mismatch").values()) + sum(counted(store, "error").values())
    lost = sum(status is not OK for status in statuses)
    expected = {"drop": {OK, MISS}, "raise_": {OK, MISS, FAILED}, "delay": {OK}}
    assert set(statuses) == expected.get(fault, {OK, CORRUPT})
    assert counted(store, "read") == {s.name.lower(): statuses.count(s) for s in set(statuses)}
    assert (reasons > 0) == (fault not in ("drop", "delay"))

    faulty.faults = FaultRates()
    assert pages.put(store, *numbers, deadline=deadline) == [OK] * 240
    assert pages.get(store, *numbers, deadline=deadline).count(OK) >= 240 - lost
    pages.put(store, *numbers, deadline=deadline)
    assert pages.get(store, *numbers, deadline=deadline) == [OK] * 240


def test_a_store_can_be_slowed_to_a_rate(client, pages, deadline):
    """All calls together; and time in which nothing is read is not saved up."""
    now = [100.0]

    def sleep(seconds):
        now[0] += seconds

    size = pages.part.page_bytes
    rate = FaultRates(rate=10 * size)
    store = client(FaultyStore(MemoryStore(), rate, sleep=sleep, clock=lambda: now[0]))
    pages.put(store, *range(40), deadline=deadline)
    for _ in range(2):
        began = now[0]
        assert pages.get(store, *range(40), deadline=deadline) == [OK] * 40
        assert now[0] - began == pytest.approx(4.0, rel=0.05)
        now[0] += 100.0


def test_nth_call_fails_and_everything_finishes_c17(client, pages, deadline):
    """The fault loop of one store: n goes up until no call is left to fail."""
    for n in range(1, 100):
        faulty = FaultyStore(MemoryStore(), FaultRates(fail_nth=n))
        store = client(faulty)
        first = pages.put(store, *range(6), deadline=deadline)
        store.find(pages.part, [pages.keys(*range(6))], deadline=deadline)
        second = pages.get(store, *range(6), deadline=deadline)
        assert {*first, *second} <= {OK, MISS, FAILED}
        assert pages.put(store, *range(6), deadline=deadline)
        if faulty.num_calls < n:
            break
        assert sum(counted(store, "error").values()) == 1
        assert pages.put(store, *range(6), deadline=deadline) == [OK] * 6
        assert pages.get(store, *range(6), deadline=deadline) == [OK] * 6
    else:
        pytest.fail("the loop never ran out of calls")


def test_corrupt_page_is_quarantined_and_can_be_written_again_c17(client, pages, deadline):
    faulty = FaultyStore(MemoryStore(), FaultRates(truncate=1.0))
    store = client(faulty)
    pages.put(store, 1, deadline=deadline)
    assert pages.get(store, 1, deadline=deadline) == [CORRUPT]
    assert counted(store, "mismatch") == {Mismatch.LENGTH: 1}
    assert pages.get(store, 1, deadline=deadline) == [MISS]
    faulty.faults = FaultRates()
    pages.put(store, 1, deadline=deadline)
    assert pages.get(store, 1, deadline=deadline) == [OK]


def test_a_disowned_page_is_a_miss_at_once_until_it_is_written_anew(client, pages, deadline):
    store = client(MemoryStore())
    pages.put(store, 1, 2, 3, deadline=deadline)
    take_out = store.disown(pages.part, pages.keys(2))
    for _ in range(2):
        assert pages.get(store, 1, 2, 3, deadline=deadline) == [OK, MISS, OK]
        found = store.find(pages.part, [pages.keys(1, 2, 3)], deadline=deadline, each=True)
        assert found == [bytes([1, 0, 1])]
        take_out()
    assert pages.put(store, 2, deadline=deadline) == [OK]
    take_out()  # another time: what is right by now stays
    assert pages.get(store, 1, 2, 3, deadline=deadline) == [OK] * 3
    assert store.counters()["disowned_pages"] == 1


def test_writing_a_disowned_page_anew_takes_the_wrong_one_out_first(client, pages, deadline):
    store = client(MemoryStore())
    pages.put(store, 1, deadline=deadline)
    take_out = store.disown(pages.part, pages.keys(1))
    assert pages.put(store, 1, deadline=deadline) == [OK]
    assert store.counters()["skipped_pages"] == 0
    take_out()
    assert pages.get(store, 1, deadline=deadline) == [OK]


class Clinging(MemoryStore):
    """Lets go of nothing."""

    def quarantine(self, name):
        raise OSError("read-only")


def test_a_page_that_the_store_does_not_let_go_of_stays_a_miss(client, pages, deadline):
    store = client(Clinging())
    pages.put(store, 1, 2, deadline=deadline)
    store.disown(pages.part, pages.keys(1))()
    assert pages.put(store, 1, 2, deadline=deadline) == [FAILED, OK]
    assert pages.get(store, 1, 2, deadline=deadline) == [MISS, OK]


def test_page_of_another_model_is_a_miss_and_stays_c17(client, pages, deadline):
    store = client(MemoryStore())
    other = type(pages)()
    other.part = type(pages.part)("full", 0, 1, b"g" * 32, pages.part.page_bytes)
    other.put(store, 1, deadline=deadline)
    assert pages.get(store, 1, deadline=deadline) == [MISS]
    assert counted(store, "mismatch") == {Mismatch.FINGERPRINT: 1}
    assert other.get(store, 1, deadline=deadline) == [OK]


class BrokenStore(MemoryStore):
    """Answers nonsense."""

    def get(self, names, into, *, deadline):
        return []

    def contains(self, names, *, deadline):
        return [True]


def test_store_that_answers_nonsense_is_a_failure_c17(client, pages, deadline):
    store = client(BrokenStore())
    assert pages.get(store, 1, 2, 3, deadline=deadline) == [FAILED] * 3
    query = [pages.keys(1, 2, 3)]
    assert store.find(pages.part, query, deadline=deadline) == [bytes(3)]


def test_breaker_opens_declines_and_recovers_c17(client, pages, clock):
    faulty = FaultyStore(MemoryStore(), FaultRates(raise_=1.0))
    breaker = Breaker(clock, max_failures=2, cooldown_s=5)
    store = client(faulty, clock=clock, breaker=breaker)
    deadline = clock.now + 1000
    for _ in range(2):
        assert pages.get(store, 1, deadline=deadline) == [FAILED]
    calls = faulty.num_calls
    assert pages.get(store, 1, deadline=deadline) == [REJECTED]
    assert pages.put(store, 1, deadline=deadline) == [REJECTED]
    assert store.find(pages.part, [pages.keys(1)], deadline=deadline) == [b"\0"]
    assert faulty.num_calls == calls
    assert counted(store, "declined") == {"breaker_open": 3}
    faulty.faults = FaultRates()
    clock.now += 5
    assert pages.put(store, 1, deadline=deadline) == [OK]
    assert pages.get(store, 1, deadline=deadline) == [OK]
    assert store.health()[0].answers


def test_a_store_that_does_not_answer_is_not_told_of_uses_either_c17(client, pages, clock):
    faulty = FaultyStore(MemoryStore(), FaultRates(raise_=1.0))
    store = client(faulty, clock=clock, breaker=Breaker(clock, max_failures=1, cooldown_s=5))
    store.touch(pages.part, pages.keys(1))
    assert pages.get(store, 1, deadline=clock.now + 1) == [FAILED]
    calls = faulty.num_calls
    store.touch(pages.part, pages.keys(1))
    assert faulty.num_calls == calls == 2


class SlowStore(MemoryStore):
    """Takes its caller past the deadline."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def get(self, names, into, *, deadline):
        self.clock.now = deadline + 1
        return [TIMEOUT] * len(names)


def test_slow_store_trips_the_breaker_c17(client, pages, clock):
    store = client(SlowStore(clock), clock=clock, breaker=Breaker(clock, max_failures=2))
    for _ in range(2):
        assert pages.get(store, 1, deadline=clock.now + 1) == [TIMEOUT]
    assert pages.get(store, 1, deadline=clock.now + 1) == [REJECTED]


class Silent(MemoryStore):
    """Waits until the deadline, and has not answered then. Remembers how often it was asked."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.num_asked = 0
        self.is_silent = True

    def contains(self, names, *, deadline):
        self.num_asked += 1
        if self.is_silent:
            self.clock.now = max(self.clock.now, deadline)
            raise TimeoutError
        return super().contains(names, deadline=deadline)

    def get(self, names, into, *, deadline):
        self.contains(names, deadline=deadline)
        return super().get(names, into, deadline=deadline)


@pytest.fixture
def silent(clock):
    return Silent(clock)


def test_a_question_that_comes_too_late_says_nothing_about_the_store(client, pages, clock, silent):
    """It has waited its turn behind others, here: the store was not asked."""
    store = client(silent, clock=clock, breaker=Breaker(clock, max_failures=1))
    for late_s in (0.0, 3.0):
        found = store.find(pages.part, [pages.keys(1)], deadline=clock.now - late_s)
        assert found == [b"\0"]
    assert silent.num_asked == 0
    assert store.health()[0].answers
    assert counted(store, "declined") == {"late": 2}


def ask(store, pages, deadline, *, what):
    if what == "find":
        assert store.find(pages.part, [pages.keys(1)], deadline=deadline) == [b"\0"]
    else:
        assert pages.get(store, 1, deadline=deadline) == [TIMEOUT]


@pytest.mark.parametrize("what", ["find", "get"])
def test_who_is_given_hardly_any_time_is_not_called_silent(client, pages, clock, silent, what):
    store = client(silent, clock=clock, breaker=Breaker(clock, max_failures=1))
    for _ in range(20):
        ask(store, pages, clock.now + 0.01, what=what)
    assert store.health()[0].answers
    silent.is_silent = False
    pages.put(store, 1, deadline=clock.now + 1)
    silent.is_silent = True
    for _ in range(40):  # an answer in between: it begins anew
        ask(store, pages, clock.now + 0.01, what=what)
    assert store.health()[0].answers


@pytest.mark.parametrize("what", ["find", "get"])
@pytest.mark.parametrize("given_s", [0.01, 1.0])
def test_a_store_that_is_silent_is_found_out_however_little_time_is_left_c17(
    client, pages, silent, what, given_s
):
    clock = silent.clock
    store = client(silent, clock=clock, breaker=Breaker(clock, max_failures=2))
    began_s = clock.now
    while store.health()[0].answers:
        ask(store, pages, clock.now + given_s, what=what)
        assert clock.now < began_s + 5
    assert counted(store, "error") == {"TimeoutError": silent.num_asked}


@pytest.mark.parametrize("what", ["find", "get"])
def test_a_store_that_gives_up_before_its_time_is_found_out_c17(client, pages, clock, what):
    """Its own library had less patience, or its network none."""

    class GivesUp(MemoryStore):
        def contains(self, names, *, deadline):
            raise TimeoutError

        def get(self, names, into, *, deadline):
            return [TIMEOUT] * len(names)

    store = client(GivesUp(), clock=clock, breaker=Breaker(clock, max_failures=2))
    for _ in range(2):
        assert store.health()[0].answers
        ask(store, pages, clock.now + 10.0, what=what)
    assert not store.health()[0].answers


def test_a_store_that_refuses_at_once_is_found_out_however_little_time_is_left_c17(
    client, pages, clock
):
    class Refusing(MemoryStore):
        def contains(self, names, *, deadline):
            raise ConnectionRefusedError

    store = client(Refusing(), clock=clock, breaker=Breaker(clock, max_failures=2))
    for _ in range(2):
        assert store.health()[0].answers
        ask(store, pages, clock.now + 0.01, what="find")
    assert not store.health()[0].answers


class StuckStore(MemoryStore):
    """Hangs in get and contains until released."""

    def __init__(self):
        super().__init__()
        self.entered = threading.Event()
        self.release = threading.Event()

    def get(self, names, into, *, deadline):
        self.entered.set()
        assert self.release.wait(120)
        return super().get(names, into, deadline=deadline)

    def contains(self, names, *, deadline):
        assert self.release.wait(120)
        return super().contains(names, deadline=deadline)


def test_stuck_call_makes_others_be_declined_at_once_c17(client, pages, clock):
    stuck = StuckStore()
    store = client(stuck, clock=clock)
    caller = threading.Thread(target=lambda: pages.get(store, 1, deadline=clock.now + 1))
    caller.start()
    assert stuck.entered.wait(120)
    clock.now += 3
    assert pages.get(store, 2, deadline=clock.now + 100) == [REJECTED]
    assert counted(store, "declined") == {"stalled": 1}
    assert not store.health()[0].answers, "nor is it said to answer"
    stuck.release.set()
    caller.join()
    assert store.health()[0].answers
    assert pages.get(store, 2, deadline=clock.now + 100) == [MISS]


class SlowToSetAside(MemoryStore):
    """It takes longer than anybody has time."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.asked = 0

    def quarantine(self, name):
        self.asked += 1
        self.clock.now += 10
        return super().quarantine(name)


def test_setting_damaged_pages_aside_takes_no_more_time_than_the_call_has_c17(client, pages, clock):
    backend = SlowToSetAside(clock)
    faulty = FaultyStore(backend, FaultRates(truncate=1.0))
    store = client(faulty, clock=clock)
    pages.put(store, 1, 2, 3, deadline=clock.now + 5)
    assert pages.get(store, 1, 2, 3, deadline=clock.now + 5) == [CORRUPT, MISS, MISS]
    assert backend.asked == 1
    assert pages.get(store, 1, 2, 3, deadline=clock.now + 5) == [MISS, CORRUPT, MISS], "the next"


def test_closed_store_declines_c18(client, pages, deadline):
    store = client(MemoryStore())
    pages.put(store, 1, deadline=deadline)
    store.close()
    assert pages.get(store, 1, deadline=deadline) == [REJECTED]
    assert store.find(pages.part, [pages.keys(1)], deadline=deadline) == [b"\0"]
    store.close()


def test_clear_under_load_only_costs_misses_c18(client, pages, deadline):
    store = client(MemoryStore())
    seen: set[PageStatus] = set()

    def load():
        for _ in range(20):
            pages.put(store, *range(8), deadline=deadline)
            seen.update(pages.get(store, *range(8), deadline=deadline))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store.clear()
    assert seen <= {OK, MISS}
