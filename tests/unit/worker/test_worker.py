"""CacheWorker: every command ends once, page by page, whatever is in it and whatever happens."""

import math
import threading

import msgspec
import pytest
import torch

from quire.errors import StoreURLError, WorkerError
from quire.messages import (
    AttachStore,
    Backup,
    Cancel,
    ClearStore,
    DetachStore,
    Fetch,
    Load,
    Probe,
    Run,
    StoreChanged,
    Touch,
    Transferred,
    Write,
)
from quire.store.account import StoreAccount
from quire.transfer import CopyState
from quire.transfer import cpu as cpu_module
from quire.types import NO_PAGES, NO_PARENT, PageIds, PageStatus, page_ids
from quire.worker.config import IoLimits
from unit.worker.fakes import (
    LAYOUT,
    WAIT_S,
    FakeStore,
    HandClock,
    collect,
    content,
    finals,
    keys,
    make_worker,
    run,
    statuses,
)

OK, MISS, FAILED = PageStatus.OK, PageStatus.MISS, PageStatus.FAILED
TIMEOUT, CANCELLED, REJECTED = PageStatus.TIMEOUT, PageStatus.CANCELLED, PageStatus.REJECTED


class Rig:
    """A worker, and the stores it opened, by URL."""

    def __init__(self, **options):
        self.stores = {}
        self.next_store = FakeStore()
        self.worker = make_worker(open_store=self.open_store, **options)

    def open_store(self, url):
        if url.startswith("bad"):
            raise StoreURLError(f"{url} is no store: use file:// or memory://")
        if url.startswith("odd"):
            raise OSError("disk on fire")
        self.stores[url] = self.next_store
        self.next_store = FakeStore()
        return self.stores[url]

    def attach(self, url="fake://a", *, held=()):
        self.next_store = FakeStore(held)
        assert run(self.worker, AttachStore(1, url)) == [StoreChanged(1, 0)]
        return self.stores[url]


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    for store in rig.stores.values():
        for gate in store.gates.values():
            gate.set()
    rig.worker.close()


def fetch(op, page_keys, pages=None, timeout_s=60.0):
    pages = range(len(page_keys)) if pages is None else pages
    return Fetch(op, "full", b"".join(page_keys), page_ids(pages), timeout_s)


def write(op, page_keys, timeout_s=60.0):
    return Write(
        op, "full", page_ids(range(len(page_keys))), [Run(keys=b"".join(page_keys))], timeout_s
    )


# ---- copies -------------------------------------------------------------------------------------


def test_backup_then_load_moves_the_bytes_and_reports_once(rig):
    pools = rig.worker.components["full"]
    pools.device.k(2)[3] = 5.0
    done = run(rig.worker, Backup(1, "full", page_ids([3]), page_ids([60])))
    assert statuses(done, 1) == [OK]
    assert done[0].seconds > 0
    assert (pools.host.pages()[60, 2, 0] == 5.0).all()
    done = run(rig.worker, Load(2, "full", page_ids([60]), page_ids([9])))
    assert statuses(done, 2) == [OK]
    assert torch.equal(pools.device.k(2)[9], pools.device.k(2)[3])
    assert not rig.worker.busy


def test_loads_that_come_together_are_one_copy_and_answer_for_themselves_c29(rig, monkeypatch):
    pools = rig.worker.components["full"]
    for page in range(4):
        pools.host.pages()[60 + page, 1, 0] = float(page + 1)
    copies, load = [], pools.engine.load
    monkeypatch.setattr(
        pools.engine, "load", lambda host, device: copies.append(len(host)) or load(host, device)
    )
    commands = [
        Load(1, "full", page_ids([60, 61]), page_ids([0, 1])),
        Load(2, "full", page_ids([9_999]), page_ids([2])),
        Load(1, "full", page_ids([62]), page_ids([5])),
        Load(3, "full", page_ids([62, 63]), page_ids([2, 3])),
    ]
    rig.worker.submit(commands)
    rig.worker.wait_layer(3, LAYOUT.num_layers - 1)
    done = collect(rig.worker, lambda done: sorted(finals(done)) == [1, 2, 3])
    assert copies == [4 * 4]
    assert (statuses(done, 1), statuses(done, 2), statuses(done, 3)) == (
        [OK, OK],
        [FAILED],
        [OK, OK],
    )
    assert [float(pools.device.k(1)[page].flatten()[0]) for page in range(4)] == [1, 2, 3, 4]
    assert rig.worker.counters()["duplicate_command"] == 1
    assert not rig.worker.busy


def test_large_loads_are_copies_of_their_own_and_one_that_cannot_be_begun_fails_alone(
    rig, monkeypatch
):
    pools = rig.worker.components["full"]
    copies, load = [], pools.engine.load

    def begin(host, device):
        copies.append(len(host) // 4)
        if len(copies) == 1:
            raise RuntimeError("no stream")
        return load(host, device)

    monkeypatch.setattr(pools.engine, "load", begin)
    monkeypatch.setattr(pools.engine, "load_pages", 2)
    first = Load(1, "full", page_ids([60, 61]), page_ids([0, 1]))
    others = [Load(op, "full", page_ids([60 + op]), page_ids([op])) for op in (2, 3)]
    rig.worker.submit([first, *others])
    done = collect(rig.worker, lambda done: sorted(finals(done)) == [1, 2, 3])
    assert copies == [2, 2]
    assert [statuses(done, op) for op in (1, 2, 3)] == [[FAILED, FAILED], [OK], [OK]]
    assert not rig.worker.busy


def test_a_store_that_cannot_say_how_it_stands_ends_nothing_but_the_saying(rig, monkeypatch):
    """The loop that asks it is the engine's, or that of a rank's process, which had ended."""
    store = rig.attach()

    def counters():
        raise KeyError("puts")

    monkeypatch.setattr(store, "counters", counters)
    assert rig.worker.store_account() == StoreAccount()
    assert rig.worker.counters() == {"error:KeyError": 1}
    assert run(rig.worker, DetachStore(2)) == [StoreChanged(2, 0)]
    assert store.closed.wait(WAIT_S)


def test_a_copy_is_reported_only_when_the_last_byte_has_landed_c9(rig, monkeypatch):
    landed = threading.Event()
    real = cpu_module.copy_rows

    def held(*args):
        assert landed.wait(120)
        real(*args)

    monkeypatch.setattr(cpu_module, "copy_rows", held)
    rig.worker.submit([Backup(1, "full", page_ids([3]), page_ids([60])), Cancel(1)])
    assert rig.worker.poll() == []
    assert rig.worker.busy
    landed.set()
    done = collect(rig.worker, lambda done: finals(done) == [1])
    assert statuses(done, 1) == [OK]


def test_wait_layer_while_running_after_the_end_and_after_a_failure_c11(rig, monkeypatch):
    rig.worker.submit([Load(1, "full", page_ids([0]), page_ids([0]))])
    for layer in range(LAYOUT.num_layers):
        rig.worker.wait_layer(1, layer)
    collect(rig.worker, lambda done: finals(done) == [1])
    rig.worker.wait_layer(1, 2)

    class Broken:
        state, error, seconds = CopyState.FAILED, "cable cut", 0.0

    pools = rig.worker.components["full"]
    monkeypatch.setattr(pools.engine, "load", lambda *_: Broken())
    assert statuses(run(rig.worker, Load(2, "full", page_ids([0]), page_ids([0]))), 2) == [FAILED]
    with pytest.raises(WorkerError, match="cable cut"):
        rig.worker.wait_layer(2, 0)


# ---- commands that make no sense ----------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        Load(7, "full", page_ids([64, 0]), page_ids([0, 1])),
        Load(7, "full", page_ids([0, 1]), page_ids([0, 16])),
        Backup(7, "full", page_ids([-1, 0]), page_ids([0, 1])),
        Backup(7, "full", page_ids([0]), page_ids([0, 1])),
        Load(7, "other", page_ids([0, 1]), page_ids([0, 1])),
        Load(7, "full", PageIds(b"123456789"), PageIds(b"123456789")),
        Fetch(7, "full", b"".join(keys(2)), page_ids([0, 64]), 1.0),
        Fetch(7, "full", b"".join(keys(1)), page_ids([0, 1]), 1.0),
        Write(7, "full", page_ids([0, 2**31 - 1]), [Run(keys=b"".join(keys(2)))], 1.0),
        Write(7, "draft", page_ids([0, 1]), [Run(keys=b"".join(keys(2)))], 1.0),
        Write(7, "full", page_ids([0, 1]), [Run(NO_PARENT[1:], b"".join(keys(2)))], 1.0),
    ],
)
def test_nonsense_is_failed_page_by_page_and_nothing_else_happens(rig, command):
    store = rig.attach()
    done = run(rig.worker, command)
    assert statuses(done, 7) == [FAILED, FAILED]
    assert store.calls == []
    assert rig.worker.counters()["malformed_command"] == 1


def test_a_probe_with_half_a_key_hits_nothing(rig):
    rig.attach().stock(keys(1))
    done = run(rig.worker, Probe(7, "full", [keys(1)[0], b"half"], 1.0))
    assert done[0].hits == [0, 0]


def test_commands_without_pages_end_at_once(rig):
    rig.attach()
    done = run(
        rig.worker,
        Load(1, "full", NO_PAGES, NO_PAGES),
        fetch(2, []),
        write(3, []),
        Probe(4, "full", [], 1.0),
    )
    assert [statuses(done, op) for op in (1, 2, 3)] == [[], [], []]


def test_the_same_operation_twice_is_reported_once(rig):
    store = rig.attach(held=["get"])
    rig.worker.submit([fetch(1, keys(2)), fetch(1, keys(2))])
    store.gates["get"].set()
    done = collect(rig.worker, lambda _: not rig.worker.busy)
    assert finals(done) == [1]
    assert rig.worker.counters() == {"duplicate_command": 1}


# ---- fetch, write, probe ------------------------------------------------------------------------


def test_without_a_store_nothing_is_found_and_nothing_is_kept(rig):
    done = run(rig.worker, fetch(1, keys(2)), write(2, keys(2)), Probe(3, "full", keys(2), 1.0))
    assert statuses(done, 1) == [MISS, MISS]
    assert statuses(done, 2) == [REJECTED, REJECTED]
    assert done[-1].hits == [0, 0]


def test_how_slow_what_was_found_is_to_get_is_told_where_it_differs(rig):
    store = rig.attach()
    ten = keys(10)
    store.stock(ten)
    probe = [b"".join(ten), b"".join(ten[:4])]
    assert run(rig.worker, Probe(1, "full", probe, 5.0))[0].paces == []
    store.paces = {4: 2.5}
    assert run(rig.worker, Probe(2, "full", probe, 5.0))[0].paces == [1.0, 2.5]


def test_what_was_written_is_probed_and_fetched_in_batches_in_order(rig):
    store = rig.attach()
    pools = rig.worker.components["full"]
    ten = keys(10)
    for page, key in enumerate(ten):
        pools.host.page_view(page)[:] = content(key)
    done = run(rig.worker, write(1, ten))
    assert statuses(done, 1) == [OK] * 10
    assert [len(c.statuses) for c in done] == [4, 4, 2]

    probed = run(rig.worker, Probe(2, "full", [b"".join(ten), b"", keys(1, "x")[0]], 5.0))
    assert probed[0].hits == [10, 0, 0]
    assert [name for name, _ in store.calls].count("contains") == 1

    done = run(rig.worker, fetch(3, ten, pages=range(20, 30)))
    assert statuses(done, 3) == [OK] * 10
    assert bytes(pools.host.page_view(29)) == content(ten[9])


def test_a_fetch_stops_at_the_first_missing_page(rig):
    store = rig.attach()
    ten = keys(10)
    store.stock(ten[:5] + ten[6:])
    done = run(rig.worker, fetch(1, ten))
    assert statuses(done, 1) == [OK, OK, OK, OK, OK, MISS, OK, OK, MISS, MISS]
    assert sum(name == "get" for name, _ in store.calls) == 2


def test_a_raising_store_fails_the_pages_left_and_is_counted(rig):
    store = rig.attach()
    store.stock(keys(10))
    store.fail = RuntimeError("boom")
    commands = (fetch(1, keys(10)), write(2, keys(3)), Probe(3, "full", keys(1), 5.0))
    done = run(rig.worker, *commands)
    assert statuses(done, 1) == [FAILED] * 10
    assert statuses(done, 2) == [FAILED] * 3
    assert next(c for c in done if c.op == 3).hits == [0]
    assert rig.worker.counters() == {"error:RuntimeError": 3}
    store.fail = None
    assert statuses(run(rig.worker, fetch(4, keys(2))), 4) == [OK, OK]


def test_whichever_call_fails_everything_ends_once_and_the_store_comes_back_c17():
    """Fault loop: the n-th call raises, n = 1, 2, 3, … until a run needs fewer calls than n."""
    num_calls = None
    n = 0
    while num_calls is None or n <= num_calls:
        n += 1
        rig = Rig()
        store = rig.attach()
        store.stock(keys(10))
        store.fail_at = n
        done = run(
            rig.worker,
            Probe(2, "full", [b"".join(keys(10))], 5.0),
            write(3, keys(6, "w")),
            fetch(4, keys(10), pages=range(20, 30)),
        )
        assert sorted(finals(done)) == [2, 3, 4]
        assert len(statuses(done, 4)) == 10
        assert len(statuses(done, 3)) == 6
        run(rig.worker, DetachStore(5))
        assert store.closed.wait(120)
        num_calls = len(store.calls)
        rig.worker.close()
    assert n >= 6  # one probe, two batches of writes, three of fetches


def test_a_store_that_answers_for_too_few_pages_fails_them_all(rig, monkeypatch):
    store = rig.attach()
    monkeypatch.setattr(store, "get", lambda *_, **__: [OK])
    assert statuses(run(rig.worker, fetch(1, keys(3))), 1) == [FAILED] * 3


def test_cancel_between_batches_and_only_then_the_final_report_c9(rig):
    store = rig.attach(held=["get"])
    store.stock(keys(10))
    rig.worker.submit([fetch(1, keys(10))])
    assert store.entered.acquire(timeout=120)
    rig.worker.submit([Cancel(1)])
    assert rig.worker.poll() == []  # the store still holds the pages
    store.gates["get"].set()
    done = collect(rig.worker, lambda done: finals(done) == [1])
    assert statuses(done, 1) == [OK] * 4 + [CANCELLED] * 6
    assert len(store.calls) == 1


def test_cancel_in_the_queue_ends_it_at_once(rig):
    store = rig.attach(held=["get"])
    rig.worker.submit([fetch(1, keys(4)), fetch(2, keys(4))])
    assert store.entered.acquire(timeout=120)
    rig.worker.submit([Cancel(2), Cancel(99)])
    assert statuses(rig.worker.poll(), 2) == [CANCELLED] * 4


@pytest.mark.parametrize("timeout_s", [5.0, 0.0, -1.0, math.nan])
def test_past_its_deadline_the_rest_is_timed_out_even_if_no_thread_is_free(timeout_s):
    clock = HandClock()
    rig = Rig(clock=clock)
    store = rig.attach(held=["get"])
    store.stock(keys(10))
    rig.worker.submit([fetch(1, keys(10), timeout_s=10.0)])
    assert store.entered.acquire(timeout=120)
    rig.worker.submit([fetch(2, keys(2), timeout_s=timeout_s)])
    clock.now += 5.0
    assert statuses(rig.worker.poll(), 2) == [TIMEOUT, TIMEOUT]
    clock.now += 5.0
    store.gates["get"].set()
    done = collect(rig.worker, lambda done: finals(done) == [1])
    assert statuses(done, 1) == [OK] * 4 + [TIMEOUT] * 6
    rig.worker.close()


def test_a_fetch_that_moves_is_not_late_however_long_it_takes():
    clock = HandClock()
    rig = Rig(clock=clock)
    store = rig.attach()
    store.stock(keys(10))
    read = store.get

    def slow_get(*args, **options):
        clock.now += 6.0
        return read(*args, **options)

    store.get = slow_get
    done = run(rig.worker, fetch(1, keys(10), timeout_s=10.0))
    assert clock.now > 10.0
    assert statuses(done, 1) == [OK] * 10
    rig.worker.close()


def test_probes_and_fetches_do_not_wait_behind_writes(rig):
    store = rig.attach(held=["put"])
    store.stock(keys(4))
    rig.worker.submit([write(op, keys(8)) for op in range(10, 40)])
    done = run(rig.worker, Probe(1, "full", [b"".join(keys(4))], 5.0), fetch(2, keys(4)))
    assert {c.op for c in done} == {1, 2}
    store.gates["put"].set()
    collect(rig.worker, lambda done: len(finals(done)) == 30)


def test_a_long_fetch_lets_a_short_one_pass(rig):
    store = rig.attach(held=["get"])
    store.stock(keys(40))
    rig.worker.submit([fetch(1, keys(40)), fetch(2, keys(2), pages=[50, 51])])
    store.gates["get"].set()
    done = collect(rig.worker, lambda done: len(finals(done)) == 2)
    assert finals(done) == [2, 1]
    assert statuses(done, 1) == [OK] * 40


def test_what_is_asked_for_after_another_comes_after_it_c52(rig):
    """Taking turns, all would be there at the end and none before."""
    rig.worker.close()
    rig = Rig(limits=IoLimits(batch_pages=1, fetch_threads=1))
    store = rig.attach(held=["get"])
    store.stock(keys(12))
    parts = [keys(12)[8:], keys(12)[4:8], keys(12)[:4]]
    fetches = [fetch(op, part, pages=range(4 * op, 4 * op + 4)) for op, part in enumerate(parts)]
    chained = [
        msgspec.structs.replace(one, after=one.op - 1 if one.op else None) for one in fetches
    ]
    rig.worker.submit(chained)
    store.gates["get"].set()
    done = collect(rig.worker, lambda done: len(finals(done)) == 3)
    assert [report.op for report in done] == [0] * 4 + [1] * 4 + [2] * 4
    rig.worker.close()


def test_a_piece_that_raises_fails_the_operation_that_it_is_of_c52(monkeypatch):
    """Also on another's turn."""
    rig = Rig(limits=IoLimits(batch_pages=1, fetch_threads=1))
    store = rig.attach(held=["get"])
    store.stock(keys(8))
    first, second = fetch(1, keys(8)[4:]), fetch(2, keys(8)[:4], pages=range(4, 8))
    get = FakeStore.get

    def raises(self, part, page_keys, *rest, **options):
        if keys(8)[6] in page_keys:
            raise RuntimeError("broken")
        return get(self, part, page_keys, *rest, **options)

    monkeypatch.setattr(FakeStore, "get", raises)
    rig.worker.submit([first, msgspec.structs.replace(second, after=1)])
    store.gates["get"].set()
    done = collect(rig.worker, lambda done: len(finals(done)) == 2)
    assert statuses(done, 1) == [OK, OK, FAILED, FAILED]
    assert statuses(done, 2) == [OK] * 4
    rig.worker.close()


def test_a_full_queue_turns_operations_away():
    rig = Rig(limits=IoLimits(fetch_threads=1, max_queued=1))
    store = rig.attach(held=["get"])
    rig.worker.submit([fetch(1, keys(2))])
    assert store.entered.acquire(timeout=120)
    rig.worker.submit([fetch(2, keys(2)), fetch(3, keys(2))])
    assert statuses(rig.worker.poll(), 3) == [REJECTED, REJECTED]
    store.gates["get"].set()
    collect(rig.worker, lambda done: sorted(finals(done)) == [1, 2])
    rig.worker.close()


def test_a_hung_probe_is_answered_at_its_deadline_and_its_store_is_not_closed_c17(rig):
    rig.worker.close()
    clock = HandClock()
    rig = Rig(clock=clock)
    store = rig.attach(held=["contains"])
    rig.worker.submit([Probe(2, "full", keys(1), 5.0)])
    assert store.entered.acquire(timeout=120)
    assert rig.worker.poll() == []
    clock.now += 6.0
    assert [probed.hits for probed in rig.worker.poll()] == [[0]]
    run(rig.worker, DetachStore(3))
    assert not store.closed.is_set()
    store.gates["contains"].set()
    assert store.closed.wait(120)
    assert rig.worker.poll() == []
    rig.worker.close()


def test_one_fetch_has_all_threads_and_is_reported_in_order(rig):
    rig.worker.close()
    rig = Rig(limits=IoLimits(batch_pages=1, fetch_threads=3))
    store = rig.attach(held=["get"])
    store.stock(keys(6))
    rig.worker.submit([fetch(1, keys(6))])
    for _ in range(3):
        assert store.entered.acquire(timeout=120)
    store.gates["get"].set()
    done = collect(rig.worker, lambda done: finals(done) == [1])
    assert statuses(done, 1) == [OK] * 6
    assert store.touched == [(keys(6), False)]
    rig.worker.close()


def test_touched_pages_reach_the_store_and_nobody_is_told_c36(rig):
    store = rig.attach()
    seen = threading.Event()
    touch = store.touch
    store.touch = lambda *args, **options: (touch(*args, **options), seen.set())
    commands = [Touch("full", b"".join(keys(3))), Touch("none", keys(1)[0]), Touch("full", b"x")]
    rig.worker.submit(commands)
    assert seen.wait(120)
    assert store.touched == [(keys(3), False)]
    assert rig.worker.poll() == []
    assert rig.worker.counters() == {"malformed_command": 2}


# ---- changing the store at run time -------------------------------------------------------------


def test_in_flight_operations_finish_on_the_store_they_started_with_c18():
    rig = Rig(limits=IoLimits(batch_pages=4, fetch_threads=4))  # three of them are inside
    old = rig.attach("fake://old", held=["get"])
    old.stock(keys(10))
    rig.worker.submit([fetch(1, keys(10))])
    assert old.entered.acquire(timeout=120)
    new = rig.attach("fake://new")
    assert statuses(run(rig.worker, fetch(2, keys(1, "n"), pages=[50])), 2) == [MISS]
    assert not old.closed.is_set()
    old.gates["get"].set()
    done = collect(rig.worker, lambda done: 1 in finals(done))
    assert statuses(done, 1) == [OK] * 10
    assert old.closed.wait(120)
    assert not new.closed.is_set()
    rig.worker.close()


def test_detach_closes_an_idle_store_and_operations_go_on_without_c18(rig):
    store = rig.attach()
    assert run(rig.worker, DetachStore(2)) == [StoreChanged(2, 0)]
    assert store.closed.wait(120)
    assert statuses(run(rig.worker, fetch(3, keys(1))), 3) == [MISS]


def test_clear_empties_the_store_c18(rig):
    store = rig.attach()
    store.stock(keys(3))
    assert run(rig.worker, ClearStore(2)) == [StoreChanged(2, 0)]
    assert store.pages == {}
    run(rig.worker, DetachStore(3))
    (answer,) = run(rig.worker, ClearStore(4))
    assert "no store is attached" in answer.error


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("bad://x", "bad://x is no store: use file:// or memory://"),
        ("odd://x", "the store failed: OSError: disk on fire"),
    ],
)
def test_a_store_that_cannot_be_opened_leaves_the_old_one_attached(rig, url, sentence):
    store = rig.attach()
    store.stock(keys(1))
    assert run(rig.worker, AttachStore(2, url)) == [StoreChanged(2, 0, sentence)]
    assert statuses(run(rig.worker, fetch(3, keys(1))), 3) == [OK]


def test_close_ends_everything_and_closes_the_store():
    rig = Rig()
    store = rig.attach(held=["get"])
    store.stock(keys(10))
    rig.worker.submit([fetch(1, keys(10)), fetch(2, keys(2)), AttachStore(3, "fake://late")])
    assert store.entered.acquire(timeout=120)
    store.gates["get"].set()
    rig.worker.close()
    rig.worker.close()
    done = rig.worker.poll()
    assert sorted(finals(done)) == [1, 2, 3]
    assert all(isinstance(c, Transferred | StoreChanged) for c in done)
    assert store.closed.is_set()
    assert rig.stores["fake://late"].closed.is_set()
