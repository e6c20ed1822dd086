"""Several ranks: each reports by itself, whatever the others do."""

from quire.messages import AttachStore, Fetch
from quire.types import PageStatus, page_ids
from quire.worker.group import LocalWorkers
from unit.worker.fakes import FakeStore, collect, finals, keys, make_worker, run


def test_each_rank_reports_its_own_slow_short_or_failing_result_c24():
    stores = [FakeStore(), FakeStore(held=["get"]), FakeStore(), FakeStore()]
    six = keys(6)
    for store in stores:
        store.stock(six)
    del stores[2].pages[six[2]]
    stores[3].fail = RuntimeError("this rank's disk is gone")
    group = LocalWorkers(
        [make_worker(rank, 4, open_store=lambda _, s=store: s) for rank, store in enumerate(stores)]
    )
    assert group.num_ranks == 4
    run(group, AttachStore(1, "fake://"), num_finals=4)

    fetch = Fetch(2, "full", b"".join(six), page_ids(range(6)), 60.0)
    done = run(group, fetch, num_finals=3)
    assert {c.rank for c in done} == {0, 2, 3}  # the slow rank holds nobody up
    stores[1].gates["get"].set()
    done += collect(group, lambda completions: finals(completions) == [2])
    agreed = {
        rank: b"".join(c.statuses for c in done if c.rank == rank).rstrip(b"\1\3")
        for rank in range(4)
    }
    assert {rank: len(ok) for rank, ok in agreed.items()} == {0: 6, 1: 6, 2: 4, 3: 0}
    assert agreed[2][2] == PageStatus.MISS
    group.close()
