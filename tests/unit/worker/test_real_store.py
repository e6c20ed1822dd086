"""A worker on the stores that ship with Quire: through memory, through a restart, between ranks."""

import pytest

from quire.messages import (
    AttachStore,
    ClearStore,
    DetachStore,
    Fetch,
    Probe,
    Run,
    StoreChanged,
    Transferred,
    Write,
)
from quire.types import PageStatus, page_ids
from quire.worker import ComponentConfig, WorkerConfig, build_worker
from unit.worker.fakes import LAYOUT, collect, content, keys, run, statuses


def open_worker(rank=0, num_ranks=1, model="m", layout=LAYOUT):
    return build_worker(WorkerConfig(rank, num_ranks, model, [ComponentConfig(layout, 8, 64)]))


def store_pages(worker, page_keys):
    host = worker.components["full"].host
    for page, key in enumerate(page_keys):
        host.page_view(page)[:] = content(key)
    pages = page_ids(range(len(page_keys)))
    done = run(worker, Write(2, "full", pages, [Run(keys=b"".join(page_keys))], 60.0))
    assert statuses(done, 2) == [PageStatus.OK] * len(page_keys)


def probe(worker, page_keys):
    return run(worker, Probe(3, "full", [b"".join(page_keys)], 10.0))[0].hits


def fetch(worker, page_keys, first_page=40):
    pages = page_ids(range(first_page, first_page + len(page_keys)))
    return statuses(run(worker, Fetch(4, "full", b"".join(page_keys), pages, 60.0)), 4)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_written_pages_come_back_and_others_are_misses(scheme, tmp_path):
    url = "memory://" if scheme == "memory" else f"file://{tmp_path}/store"
    worker = open_worker()
    assert run(worker, AttachStore(1, url)) == [StoreChanged(1, 0)]
    ten = keys(10)
    store_pages(worker, ten)
    assert probe(worker, [*ten, *keys(1, "x")]) == [10]
    assert fetch(worker, ten) == [PageStatus.OK] * 10
    host = worker.components["full"].host
    assert [bytes(host.page_view(40 + i)) for i in range(10)] == [content(key) for key in ten]
    assert fetch(worker, keys(2, "x")) == [PageStatus.MISS] * 2
    assert run(worker, DetachStore(5)) == [StoreChanged(5, 0)]
    worker.close()


def test_pages_survive_the_worker_but_not_a_change_of_model_or_rank(tmp_path):
    url = f"file://{tmp_path}/store"
    first = open_worker()
    run(first, AttachStore(1, url))
    store_pages(first, keys(3))
    first.close()
    for expected, options in [
        (PageStatus.OK, {}),
        (PageStatus.MISS, {"model": "another"}),
        (PageStatus.MISS, {"rank": 1, "num_ranks": 2}),
    ]:
        worker = open_worker(**options)
        run(worker, AttachStore(1, url))
        assert fetch(worker, keys(3)) == [expected] * 3
        worker.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_lying_store_costs_misses_but_never_a_wrong_page_c17(seed):
    worker = open_worker()
    faults = f"seed={seed}&drop=0.1&corrupt=0.1&truncate=0.1&raise=0.1"
    assert run(worker, AttachStore(1, f"faulty+memory://?{faults}")) == [StoreChanged(1, 0)]
    host = worker.components["full"].host
    twenty = keys(20)
    for page, key in enumerate(twenty):
        host.page_view(page)[:] = content(key)
    run(worker, Write(2, "full", page_ids(range(20)), [Run(keys=b"".join(twenty))], 60.0))
    for i in range(20):
        host.page_view(20 + i)[:] = b"\xa5" * LAYOUT.page_stride_bytes
    done = run(worker, Fetch(3, "full", b"".join(twenty), page_ids(range(20, 40)), 60.0))
    for i, status in enumerate(statuses(done, 3)):
        if status is PageStatus.OK:
            assert bytes(host.page_view(20 + i)) == content(twenty[i])
    worker.close()


def test_changing_the_store_under_load_fails_no_operation_c18(tmp_path):
    worker = open_worker()
    four = keys(4)
    ops = iter(range(1000, 10_000))
    expected = []
    done = []
    for turn in range(40):
        url = f"file://{tmp_path}/{turn % 2}" if turn % 3 else "memory://"
        change = (AttachStore(turn, url), DetachStore(turn), ClearStore(turn))[turn % 4 % 3]
        slots = [page_ids(range(4 * i, 4 * i + 4)) for i in range(8)]
        traffic = [
            Write(next(ops), "full", slot, [Run(keys=b"".join(four))], 60.0) for slot in slots[:4]
        ]
        traffic += [Fetch(next(ops), "full", b"".join(four), slot, 60.0) for slot in slots[4:]]
        expected += [command.op for command in traffic]
        worker.submit([*traffic[:4], change, *traffic[4:]])
        done += worker.poll()
    done += collect(worker, lambda _: not worker.busy)
    reports = [c for c in done if isinstance(c, Transferred)]
    assert sorted(c.op for c in reports if c.final) == expected
    harmless = {PageStatus.OK, PageStatus.MISS, PageStatus.REJECTED}
    assert {PageStatus(status) for c in reports for status in c.statuses} <= harmless
    assert worker.counters().keys() <= {"error:StoreError"}  # clearing without a store
    worker.close()


@pytest.mark.parametrize("url", ["nosuch://x", "file://", "rubbish", "memory://?max=abc"])
def test_a_wrong_url_is_answered_with_one_sentence_c18(url):
    worker = open_worker()
    (answer,) = run(worker, AttachStore(1, url))
    assert answer.error
    assert "\n" not in answer.error
    assert fetch(worker, keys(1)) == [PageStatus.MISS]
    worker.close()
