"""Worker processes: they work like local ones, die visibly, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from quire.errors import MemoryBudgetError, WorkerError
from quire.messages import (
    AttachStore,
    DetachStore,
    Fetch,
    Probe,
    Run,
    StoreChanged,
    Transferred,
    WorkerLost,
    Write,
)
from quire.store.account import StoreAccount, StoreHealth
from quire.types import PageStatus, page_ids
from quire.worker import ComponentConfig, WorkerConfig, wire
from quire.worker.process import serve
from quire.worker.remote import Liveness, RemoteWorkers
from store_servers import Valkey
from unit.worker.fakes import LAYOUT, WAIT_S, collect, finals, keys, make_worker, run, statuses


def configs(num_ranks, device="cpu", host_pages=16):
    component = ComponentConfig(LAYOUT, 8, host_pages)
    return [WorkerConfig(rank, num_ranks, "m", [component], device) for rank in range(num_ranks)]


def socket_file(group):
    return Path(group.address.removeprefix("ipc://"))


def pids(group):
    return [child.process.pid for child in group._children.values()]


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_ranks_work_then_one_is_killed_and_the_other_goes_on_c24(tmp_path):
    group = RemoteWorkers(configs(2))
    try:
        assert oct(socket_file(group).parent.stat().st_mode)[-3:] == "700"
        attached = run(group, AttachStore(1, f"file://{tmp_path}/store"), num_finals=2)
        assert sorted(attached, key=lambda c: c.rank) == [StoreChanged(1, 0), StoreChanged(1, 1)]
        three = b"".join(keys(3))
        write = Write(2, "full", page_ids([0, 1, 2]), [Run(keys=three)], 60.0)
        run(group, write, num_finals=2)
        done = run(group, Fetch(3, "full", three, page_ids([5, 6, 7]), 60.0), num_finals=2)
        for rank in range(2):
            assert statuses([c for c in done if c.rank == rank], 3) == [PageStatus.OK] * 3

        # Rubbish from a stranger, and from a stranger who claims to be a rank.
        with zmq.Context() as context:
            for data in (b"\xff\x00rubbish", wire.encode(wire.Report([WorkerLost(0, "lies")]))):
                with context.socket(zmq.DEALER) as stranger:
                    stranger.connect(group.address)
                    stranger.send(data)
            wait_until(lambda: group.poll() == [] and group.dropped_messages == 2)

        os.kill(pids(group)[1], signal.SIGKILL)
        lost = collect(group, bool)
        assert lost == [WorkerLost(1, "worker 1: killed by signal 9")]
        done = run(group, Probe(4, "full", [three], 10.0), num_finals=1)
        assert [(c.rank, c.hits) for c in done] == [(0, [3])]
        assert group.poll() == []
    finally:
        running = pids(group)
        group.close()
    group.close()
    assert not any(is_running(pid) for pid in running)
    assert not socket_file(group).parent.exists()


def test_what_ranks_counted_of_a_store_is_added_up_and_a_breaker_is_seen(tmp_path):
    """As last heard of, with a sign of life."""
    server = Valkey(tmp_path)
    group = RemoteWorkers(configs(2), liveness=Liveness(heartbeat_s=0.05))

    def told(condition):
        wait_until(lambda: group.poll() == [] and condition(group.store_account()))

    try:
        assert group.store_account() == StoreAccount()
        run(group, AttachStore(1, f"file://{tmp_path}/store?max=1GiB"), num_finals=2)
        three = b"".join(keys(3))
        run(group, Write(2, "full", page_ids([0, 1, 2]), [Run(keys=three)], 60.0), num_finals=2)
        told(lambda found: found.counters.get("written:ok") == 6)
        (health,) = group.store_account().stores
        assert health.answers
        assert health.budget.max_bytes == 1 << 30  # one for both
        assert health.budget.used_bytes

        run(group, DetachStore(3), num_finals=2)
        told(lambda found: found == StoreAccount())
        run(group, AttachStore(4, server.url), num_finals=2)
        told(lambda found: found.stores == [StoreHealth()])
        server.stop()
        for op in range(5, 15):
            run(group, Fetch(op, "full", three, page_ids([5, 6, 7]), 5.0), num_finals=2)
        told(lambda found: found.counters["breaker_opened"] >= 2)
        told(lambda found: found.stores == [StoreHealth(answers=False)])
    finally:
        group.close()
        server.stop()


def test_a_hung_worker_is_killed_and_reported_lost():
    group = RemoteWorkers(configs(1), liveness=Liveness(heartbeat_s=0.05, silence_s=0.5))
    os.kill(pids(group)[0], signal.SIGSTOP)
    (lost,) = collect(group, bool)
    assert lost.rank == 0
    assert "no sign of life" in lost.reason
    group.close()


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(WorkerError, match=r"worker 0 could not start: .*device"):
        RemoteWorkers(configs(1, device="no-such-device"))
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(WorkerError, match=r"did not start within 0\.01 s"):
        RemoteWorkers(configs(1), liveness=Liveness(start_timeout_s=0.01))
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_fit_together_are_refused_before_any_is_started():
    with pytest.raises(MemoryBudgetError, match="2 workers asks for"):
        RemoteWorkers(configs(2, host_pages=1 << 40))


LEADER = """
import sys, time
from quire.memory.page_layout import PageLayout
from quire.worker import ComponentConfig, WorkerConfig
from quire.worker.remote import RemoteWorkers
layout = PageLayout("full", 3, 2, 8, "float32", 4)
group = RemoteWorkers([WorkerConfig(0, 1, "m", [ComponentConfig(layout, 8, 8)])])
print(*[child.process.pid for child in group._children.values()], group.address, flush=True)
time.sleep(60)
"""


def test_workers_follow_a_leader_that_was_killed_and_tidy_up():
    with subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE) as leader:
        assert leader.stdout is not None
        pid, address = leader.stdout.readline().decode().split()
        assert is_running(int(pid))
        leader.kill()
    wait_until(lambda: not is_running(int(pid)))
    assert not Path(address.removeprefix("ipc://")).parent.exists()


def test_rubbish_from_the_leader_changes_nothing(tmp_path):
    address = f"ipc://{tmp_path}/s"
    worker = make_worker()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as leader:
        leader.bind(address)
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.ROUTING_ID, b"w")
            socket.connect(address)
            stop = threading.Event()
            loop = threading.Thread(
                target=serve, args=(worker, socket, stop), kwargs={"heartbeat_s": 0.01}
            )
            loop.start()
            assert leader.recv_multipart()[0] == b"w"
            probe = wire.encode(wire.StepCommands([Probe(1, "full", [b""], 1.0)]))
            for frames in ([b"\xc1\xff"], [probe, probe], [b""], [probe[:-3]], [probe]):
                leader.send_multipart([b"w", *frames])
            leader.send_multipart([b"w", wire.encode(wire.Shutdown())])
            loop.join(WAIT_S)
            assert not loop.is_alive()
            reports = []
            while leader.poll(100):
                message = wire.decode(wire.to_leader, leader.recv_multipart()[1])
                reports += message.completions if isinstance(message, wire.Report) else []
    worker.close()
    assert finals(reports + worker.poll()) == [1]


def test_a_rank_cannot_report_for_another():
    group = object.__new__(RemoteWorkers)
    group.dropped_messages = 0

    class Child:
        rank = 1

    own = Transferred(5, 1, "full", 0, b"\0", final=True)
    forged = Transferred(5, 0, "full", 0, b"\0", final=True)
    assert group._handle(Child(), wire.Report([own, forged])) == [own]
    assert group.dropped_messages == 1
