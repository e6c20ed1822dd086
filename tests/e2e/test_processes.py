"""Two ranks as real processes. Their memory cannot be seen from here, so bytes are checked where
they come out: what local workers stored goes through device and host of the processes into a
second store, and local workers compare it there."""

import os
import signal

import pytest

from e2e.harness import Engine, doc
from quire.config import WriteConfig, WritePolicy
from quire.manager import Decline, StoreState
from quire.types import Tier, split_keys
from quire.worker.remote import RemoteWorkers

SELECTIVE = WriteConfig(WritePolicy.WRITE_THROUGH_SELECTIVE, retry_delay_s=0.005)


def remote(url: str, **options) -> Engine:
    return Engine(url, ranks=2, processes=True, **options)


def test_bytes_pass_unharmed_through_all_tiers_of_two_processes_c24(tmp_path):
    first, second = (f"file://{tmp_path}/{name}" for name in ("first", "second"))
    key = doc(10, seed=1)
    with Engine(first, ranks=2) as engine:
        engine.serve(key)
    name = split_keys(key.page_keys())[8].hex()
    (tmp_path / "first" / "objects" / name[:2] / f"{name}.full.1of2").unlink()

    with remote(first, write=SELECTIVE) as engine:
        # Rank 1 lacks page 8, so both ranks agree on the eight pages before it.
        lease = engine.manager.acquire(engine.manager.match(key), "r")
        prefetch = engine.manager.prefetch(lease)
        engine.until(lambda: engine.manager.ready(lease))
        assert engine.manager.admit(lease) == prefetch.num_landed == 8
        assert engine.manager.load(lease) == 8
        engine.until(lambda: not lease.loads)
        engine.manager.release(lease)
        engine.settle()

        # From the device only, into another store: backup, then write.
        engine.flush(Tier.HOST)
        change = engine.manager.store.attach(second)
        engine.until(lambda: change.done)
        assert change.error == ""
        for _ in range(2):
            engine.manager.release(engine.manager.acquire(engine.manager.match(key), "again"))
            engine.settle()
        engine.assert_all_pages_come_back()

    with Engine(second, ranks=2) as engine:
        assert engine.serve(key) == (0, 0, 8, 2)  # compared page by page, on both ranks
        engine.assert_all_pages_come_back()


def test_a_killed_rank_ends_every_operation_and_the_cache_goes_on_c24(tmp_path):
    with remote(f"file://{tmp_path}/store") as engine:
        assert engine.serve(doc(8, seed=1)) == (0, 0, 0, 8)
        engine.flush(Tier.DEVICE, Tier.HOST)
        waiting = engine.start(doc(8, seed=1))
        engine.step()
        assert isinstance(engine.workers, RemoteWorkers)
        victim = next(c for c in engine.workers._children.values() if c.rank == 1)
        os.kill(victim.process.pid, signal.SIGKILL)

        def served() -> bool:
            if not waiting.done:
                waiting.advance()
            return waiting.done

        engine.until(served)
        engine.until(lambda: bool(engine.manager.operations.lost_ranks))
        # The engine may drain: what is on the device still matches, nothing new is started.
        assert engine.serve(doc(8, seed=1))[0] == 8
        late = engine.start(doc(6, seed=2))
        assert late.prefetch.declined is Decline.WORKER_LOST
        engine.until(lambda: late.done or late.advance() or late.done)
        engine.assert_all_pages_come_back()


def test_an_unusable_store_is_refused_by_all_ranks_and_nothing_is_lost(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with remote("") as engine:
        change = engine.manager.store.attach(f"file://{tmp_path}/file")
        engine.until(lambda: change.done)
        assert "is a file, not a directory: give a directory" in change.error
        engine.until(lambda: engine.manager.store.state is StoreState.DETACHED)
        assert engine.serve(doc(5, seed=1)) == (0, 0, 0, 5)
        assert engine.serve(doc(5, seed=1)) == (5, 0, 0, 0)
        engine.assert_all_pages_come_back()
    assert (tmp_path / "file").read_text() == "not a directory"


@pytest.mark.parametrize("faults", ["drop=0.1&corrupt=0.1&truncate=0.1&raise=0.1"])
def test_processes_on_a_faulty_store_finish_and_leak_nothing_c17(faults, tmp_path):
    url = f"faulty+file://{tmp_path}/store?seed=5&{faults}"
    common = doc(4, seed=100)
    prompts = [doc(4, seed=i, shared=common) for i in range(4)]
    with remote(url) as engine:
        for _ in range(3):
            engine.serve_all(prompts)
            engine.settle()
            engine.flush(Tier.DEVICE, Tier.HOST)
        engine.assert_all_pages_come_back()
