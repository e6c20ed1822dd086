"""Workers of two engines: one serves pages, the other fetches them; each operation ends once."""

import threading

import pytest

from quire.errors import ConfigError
from quire.memory.page_layout import PageLayout
from quire.messages import (
    AttachStore,
    Cancel,
    Fetch,
    PeerPart,
    PeerSource,
    Run,
    Serve,
    Write,
)
from quire.peer.identity import make_identity
from quire.peer.tickets import Tickets
from quire.types import NO_PAGES, PageIds, PageStatus, page_ids
from quire.worker import (
    ComponentConfig,
    IoLimits,
    LocalWorkers,
    PeerServing,
    WorkerConfig,
    build_worker,
)
from quire.worker.peering import PeerTask
from quire.worker.remote import RemoteWorkers
from quire.worker.tasks import Reporter
from unit.peer.rig import TICKET_KEY, Impostor, answer, ask, dial_in, wait_until
from unit.worker.fakes import LAYOUT, WAIT_S, collect, content, finals, keys, make_worker, run
from unit.worker.fakes import statuses as statuses_of

OK, MISS, FAILED = PageStatus.OK, PageStatus.MISS, PageStatus.FAILED
HEADS = 4
STATES = PageLayout("recurrent", 2, 1, 501, "uint8", 1, num_planes=1)
PAGES = [3, 9, 4, 11]


def config(rank=0, num_ranks=1, *, epoch="e", port=0, io=None, total=HEADS):
    """A model of 4 heads and one state, shared among the ranks."""
    heads = (rank * total // num_ranks, (rank + 1) * total // num_ranks)
    full = PageLayout("full", 3, heads[1] - heads[0], 8, "float32", 4)
    peer = PeerServing(
        secret="s",
        epoch=epoch,
        identity=make_identity("m", [full, STATES], {"full": total, "recurrent": 1}),
        heads={"full": heads, "recurrent": (0, 1)},
        port=port,
    )
    components = [ComponentConfig(layout, 4, 16) for layout in (full, STATES)]
    return WorkerConfig(
        rank, num_ranks, "m", components, io=io or IoLimits(peer_batch_pages=2), peer=peer
    )


def engine(num_ranks=1, **options):
    return LocalWorkers(
        [build_worker(config(rank, num_ranks, **options)) for rank in range(num_ranks)]
    )


def parts(group):
    heads = [worker.rank for worker in group.workers] if isinstance(group, LocalWorkers) else [0]
    count = len(heads)
    return [
        PeerPart(address, rank * HEADS // count, (rank + 1) * HEADS // count)
        for rank, address in enumerate(group.peer_addresses)
    ]


def fetch(op, group, *, grant=1, component="full", host=range(4), first=0, timeout_s=WAIT_S):
    source = PeerSource("e", grant, first, parts(group), Tickets(b"").of(grant))
    return Fetch(op, component, b"", page_ids(host), timeout_s, source)


def by_rank(completions, op, num_ranks):
    return [statuses_of([c for c in completions if c.rank == r], op) for r in range(num_ranks)]


def put_random(group, component="full"):
    """The same heads hold the same values, however they are shared."""
    for worker in group.workers:
        pages = worker.components[component].host.pages()
        for page in range(pages.shape[0]):
            for head in range(pages.shape[4]):
                shared = worker.rank * HEADS // len(group.workers) + head
                pages[page, :, :, :, head] = 100 * page + shared


@pytest.fixture
def engines():
    opened = []

    def make(*args, **options):
        opened.append(engine(*args, **options))
        return opened[-1]

    yield make
    for group in opened:
        group.close()


@pytest.mark.parametrize(("num_holders", "num_askers"), [(1, 1), (1, 2), (2, 1)])
def test_pages_go_from_one_engine_to_another(engines, num_holders, num_askers):
    holder, asker = engines(num_holders), engines(num_askers)
    put_random(holder)
    holder.submit([Serve(1, "full", page_ids(PAGES))])
    done = run(asker, fetch(2, holder, host=[0, 1, 2, 3]), num_finals=num_askers)
    assert by_rank(done, 2, num_askers) == [[OK] * 4] * num_askers
    for worker in asker.workers:
        pages = worker.components["full"].host.pages()
        first = worker.rank * HEADS // num_askers
        for index, page in enumerate(PAGES):
            for head in range(pages.shape[4]):
                assert (pages[index, :, :, :, head] == 100 * page + first + head).all()
    assert holder.poll() == []  # nothing until it is cancelled
    assert not any(worker.busy for worker in holder.workers)
    done = run(holder, Cancel(1), num_finals=num_holders)
    assert by_rank(done, 1, num_holders) == [[OK] * 4] * num_holders
    asked = asker.peer_counters()
    assert asked["peer_received_pages"] == 4 * num_askers
    assert asked["peer_received_bytes"] == holder.peer_counters()["peer_sent_bytes"]
    done = run(asker, fetch(3, holder, timeout_s=5.0), num_finals=num_askers)
    assert by_rank(done, 3, num_askers) == [[MISS] * 4] * num_askers


def test_states_travel_like_pages(engines):
    holder, asker = engines(), engines()
    for page in range(16):
        holder.workers[0].components["recurrent"].host.pages()[page] = page
    holder.submit([Serve(1, "recurrent", page_ids([7]))])
    done = run(asker, fetch(2, holder, component="recurrent", host=[5]))
    assert statuses_of(done, 2) == [OK]
    assert (asker.workers[0].components["recurrent"].host.pages()[5] == 7).all()


def test_a_page_that_fails_does_not_stop_those_behind_it(engines):
    holder, asker = engines(), engines()
    holder.submit([Serve(1, "full", page_ids([1, 2, 3]))])
    backwards = PeerSource("e", 1, 2, parts(holder), Tickets(b"").of(1))
    done = run(asker, Fetch(2, "full", b"", page_ids([0, 1, 2]), WAIT_S, backwards))
    assert statuses_of(done, 2) == [OK, MISS, MISS]
    assert [c.first for c in done] == [0, 2]  # batches of two: the second was tried, too


def test_a_serve_that_is_cancelled_ends_once_and_only_when_nobody_reads():
    big = PageLayout("full", 2, 2, 1024, "float32", 64)
    identity = make_identity("m", [big], {"full": 2})
    peer = PeerServing("s", "life-1", identity, {"full": (0, 2)}, ticket_key=TICKET_KEY)
    worker = build_worker(WorkerConfig(0, 1, "m", [ComponentConfig(big, 1, 8)], peer=peer))
    worker.submit([Serve(7, "full", page_ids(range(8)))])
    reader = dial_in(worker.peer_address, identity, receive_buffer=1 << 18, secret="s")
    ask(reader, count=8)
    wait_until(lambda: worker._peering.server._grants._open[7, "full"].num_readers)
    worker.submit([Cancel(7), Cancel(7)])
    assert worker.poll() == []
    assert worker.busy
    answer(reader)
    done = collect(worker, lambda done: finals(done) == [7])
    assert statuses_of(done, 7) == [OK] * 8
    worker.submit([Cancel(7)])
    assert worker.poll() == []
    assert not worker.busy
    reader.close()
    worker.close()


def test_a_fetch_can_be_cancelled_while_the_peer_stalls(engines):
    asker = engines()
    began, stop = threading.Event(), threading.Event()

    def stall(connection, read):
        began.set()
        return stop.wait(WAIT_S) and False

    identity = config().peer.identity
    impostor = Impostor(stall, identity=identity, secret="s")
    source = PeerSource("e", 1, 0, [PeerPart(impostor.address, 0, HEADS)])
    asker.submit([Fetch(2, "full", b"", page_ids(range(4)), 60.0, source)])
    assert began.wait(WAIT_S)
    done = run(asker, Cancel(2), num_finals=1)
    assert statuses_of(done, 2) == [PageStatus.CANCELLED] * 4
    done = run(asker, Fetch(3, "full", b"", page_ids(range(4)), 0.3, source))
    assert statuses_of(done, 3) == [PageStatus.TIMEOUT] * 4
    # Closing does not wait for a stalled peer either.
    asker.submit([Fetch(4, "full", b"", page_ids(range(4)), 60.0, source)])
    asker.close()
    assert statuses_of(asker.poll(), 4) == [PageStatus.CANCELLED] * 4
    stop.set()
    impostor.close()


def test_a_peer_that_stalls_holds_up_nobody_else(engines):
    """More reads of it than there are threads for one peer, and then one of another."""
    holder, asker = engines(), engines()
    stop = threading.Event()
    identity = config().peer.identity
    impostor = Impostor(lambda *_: stop.wait(WAIT_S) and False, identity=identity, secret="s")
    stalled = PeerSource("stalled", 1, 0, [PeerPart(impostor.address, 0, HEADS)])
    for op in range(2, 8):
        asker.submit([Fetch(op, "full", b"", page_ids([op]), 60.0, stalled)])
    holder.submit([Serve(1, "full", page_ids(range(4)))])
    done = run(asker, fetch(9, holder, host=[12, 13, 14, 15]), num_finals=1)
    assert statuses_of(done, 9) == [OK] * 4
    stop.set()
    impostor.close()


# ---- wrong commands -----------------------------------------------------------------------------


class SlowClient:
    """A read takes as long as it may; or longer."""

    def __init__(self, seconds):
        self.now, self._seconds = 0.0, seconds

    def read(self, source, region, pages, *, offset, timeout_s, cancelled, came):
        self.now += min(self._seconds, timeout_s)
        return [PageStatus.TIMEOUT if self._seconds > timeout_s else OK] * len(pages)


@pytest.mark.parametrize(("read_s", "expected"), [(0.9, [OK] * 4), (1.1, [PageStatus.TIMEOUT] * 4)])
def test_a_fetch_that_waits_for_a_thread_is_not_late_a_piece_that_takes_too_long_is_c45(
    read_s, expected
):
    """More is on its way than the link moves in the time of one."""
    client, reports = SlowClient(read_s), []
    source = PeerSource("e", 1, 0, [])
    task = PeerTask(
        Fetch(1, "full", b"", page_ids(range(4)), 1.0, source),
        Reporter(0, lambda: client.now, reports.append, lambda error: None),
        source,
        region=None,
        client=client,
        batch_pages=2,
    )
    while task.has_more:
        client.now += 10.0  # others have their turn
        task.expire(client.now)
        piece = task.take()
        assert piece is not None
        piece()
    assert statuses_of(reports, 1) == expected
    assert [report.final for report in reports][-1]


def test_wrong_commands_are_refused_with_one_report(engines):
    group = engines()
    some = page_ids([1])
    source = PeerSource("e", 1, 0, parts(group), Tickets(b"").of(1))
    wrong = [
        Serve(1, "full", page_ids([99])),
        Serve(2, "full", PageIds(b"xyz")),
        Serve(3, "nosuch", some),
        Fetch(4, "full", b"", page_ids([-1]), 1.0, source),
        Fetch(5, "full", b"short", some, 1.0, source),
        Fetch(6, "full", b"", some, 1.0, PeerSource("e", 1, -1, [])),
    ]
    done = run(group, *wrong)
    assert sorted(finals(done)) == [1, 2, 3, 4, 5, 6]
    assert {status for c in done for status in c.statuses} == {FAILED}
    assert group.workers[0].counters() == {"malformed_command": 6}
    assert statuses_of(run(group, Fetch(7, "full", b"", NO_PAGES, 1.0, source)), 7) == []


def test_the_same_serve_twice_is_one_serve(engines):
    group = engines()
    group.submit([Serve(1, "full", page_ids([1])), Serve(1, "full", page_ids([2, 3]))])
    assert group.workers[0].counters() == {"duplicate_command": 1}
    assert statuses_of(run(group, Cancel(1)), 1) == [OK]


def test_a_worker_without_peers_refuses_and_has_no_address():
    worker = make_worker()
    source = PeerSource("e", 1, 0, [PeerPart("tcp://127.0.0.1:1", 0, 2)])
    done = run(
        worker,
        Serve(1, "full", page_ids([1, 2])),
        Fetch(2, "full", b"".join(keys(2)), page_ids([1, 2]), 1.0, source),
    )
    assert statuses_of(done, 1) == statuses_of(done, 2) == [FAILED, FAILED]
    assert worker.peer_address == ""
    assert worker.peer_counters() == {}
    worker.close()


def test_closing_reports_what_was_served(engines):
    group = engines()
    group.submit([Serve(1, "full", page_ids([1]))])
    group.close()
    assert statuses_of(group.poll(), 1) == [OK]


def test_configurations_that_cannot_be():
    with pytest.raises(ConfigError, match=r"peer\.heads of 'full' is \[0, 4\)"):
        WorkerConfig(0, 1, "m", [ComponentConfig(LAYOUT, 1, 1)], peer=config().peer)
    with pytest.raises(ConfigError, match=r"io\.peer_threads"):
        IoLimits(peer_threads=0)
    assert "secret" not in repr(config())


def test_a_port_in_use_is_named_and_nothing_is_left_open(engines):
    group = engines()
    port = int(group.peer_addresses[0].rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
        build_worker(config(port=port))


# ---- other processes ----------------------------------------------------------------------------


def test_a_rank_in_another_process_serves_and_counts(engines, tmp_path):
    """What it serves comes from a store, where a worker of this process has put it."""
    four, asker = keys(4), engines()
    writer = build_worker(config())
    host = writer.components["full"].host
    for page, key in enumerate(four):
        host.page_view(page)[:] = (content(key) * 9)[: host.layout.page_stride_bytes]
    expected = [bytes(host.page_view(page)[: host.layout.page_bytes]) for page in range(4)]
    url = f"file://{tmp_path}/store"
    run(writer, AttachStore(1, url))
    run(writer, Write(2, "full", page_ids(range(4)), [Run(keys=b"".join(four))], 60.0))
    writer.close()

    holder = RemoteWorkers([config()])
    try:
        assert holder.peer_addresses[0].startswith("tcp://127.0.0.1:")
        run(holder, AttachStore(1, url))
        done = run(holder, Fetch(2, "full", b"".join(four), page_ids(range(4)), 60.0))
        assert statuses_of(done, 2) == [OK] * 4
        # The fetch may be there before the serve is.
        asker.submit([fetch(3, holder)])
        holder.submit([Serve(1, "full", page_ids(range(4)))])
        done = collect(asker, lambda done: finals(done) == [3])
        assert statuses_of(done, 3) == [OK] * 4
        own = asker.workers[0].components["full"].host
        assert [bytes(own.page_view(i)[: own.layout.page_bytes]) for i in range(4)] == expected
        assert statuses_of(run(holder, Cancel(1)), 1) == [OK] * 4
        sent = {"peer_sent_pages": 4, "peer_sent_bytes": 4 * own.layout.page_bytes}

        def counted():
            holder.poll()
            return sent.items() <= holder.peer_counters().items()

        wait_until(counted)
    finally:
        holder.close()
    assert statuses_of(run(asker, fetch(4, holder)), 4) == [FAILED] * 4
