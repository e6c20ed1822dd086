"""Real manager, real workers, real file store: every tier, restarts, faults. Bytes always right."""

from pathlib import Path

import pytest

from e2e.harness import Engine, doc
from quire.config import PrefetchPolicy
from quire.store.faulty import FaultyStore
from quire.types import Tier, split_keys


def object_files(folder: Path, key, page: int) -> list[Path]:
    name = split_keys(key.page_keys())[page].hex()
    return sorted(folder.glob(f"store/objects/*/{name}.*"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prefix_comes_from_every_tier_and_survives_a_restart(ranks, tmp_path):
    url, key = f"file://{tmp_path}/store", doc(12, seed=1)
    with Engine(url, ranks=ranks) as engine:
        assert engine.serve(key) == (0, 0, 0, 12)
        assert engine.serve(key) == (12, 0, 0, 0)
        assert engine.serve(doc(3, seed=2, shared=key)) == (12, 0, 0, 3)
        engine.flush(Tier.DEVICE)
        assert engine.serve(key) == (0, 12, 0, 0)
        engine.flush(Tier.DEVICE, Tier.HOST)
        assert engine.serve(key) == (0, 0, 12, 0)
        engine.assert_all_pages_come_back()
        assert engine.checked_pages >= ranks * 12 * 5
    with Engine(url, ranks=ranks) as engine:
        assert engine.serve(doc(3, seed=2, shared=key)) == (0, 0, 15, 0)
        engine.assert_all_pages_come_back()


@pytest.mark.parametrize("how", ["lost", "short", "bit", "empty"])
def test_a_damaged_page_is_a_miss_and_is_repaired_c16_c17(how, tmp_path):
    url, key = f"file://{tmp_path}/store", doc(10, seed=1)
    with Engine(url) as engine:
        engine.serve(key)
    (path,) = object_files(tmp_path, key, 6)
    data = bytearray(path.read_bytes())
    if how == "lost":
        path.unlink()
    elif how == "short":
        path.write_bytes(data[:-100])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    with Engine(url) as engine:
        assert engine.serve(key) == (0, 0, 6, 4)
        assert sum(engine.manager.counters.snapshot().values())
        engine.assert_all_pages_come_back()
        assert engine.serve(key) == (0, 0, 10, 0)


def test_pages_of_another_model_are_misses_and_stay_its_own(tmp_path):
    """Same keys, other weights, as when a namespace was built wrongly: the header decides."""
    url, key = f"file://{tmp_path}/store", doc(6, seed=1)
    with Engine(url) as engine:
        engine.serve(key)
    before = [path.read_bytes() for page in range(6) for path in object_files(tmp_path, key, page)]
    with Engine(url, model="another") as engine:
        assert engine.serve(key) == (0, 0, 0, 6)
        assert engine.manager.counters.fetch_missed_pages == 6
        engine.assert_all_pages_come_back()
    after = [path.read_bytes() for page in range(6) for path in object_files(tmp_path, key, page)]
    assert before == after
    with Engine(url) as engine:
        assert engine.serve(key) == (0, 0, 6, 0)


@pytest.mark.parametrize("missing_rank", [0, 1])
def test_the_rank_with_the_shortest_prefix_decides_c24(missing_rank, tmp_path):
    url, key = f"file://{tmp_path}/store", doc(10, seed=1)
    with Engine(url, ranks=2) as engine:
        engine.serve(key)
    object_files(tmp_path, key, 7)[missing_rank].unlink()
    with Engine(url, ranks=2) as engine:
        assert engine.serve(key) == (0, 0, 7, 3)
        engine.assert_all_pages_come_back()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_store_with_every_fault_costs_misses_only_c17(seed, ranks, tmp_path):
    faults = "drop=0.05&truncate=0.05&corrupt=0.05&raise=0.05&delay=0.05&delay_s=0.002"
    url = f"faulty+file://{tmp_path}/store?seed={seed}&{faults}"
    common = doc(4, seed=100)
    prompts = [doc(4 + i % 5, seed=i, shared=common) for i in range(8)]
    with Engine(url, ranks=ranks) as engine:
        # Which call meets which fault depends on the threads: go on until something was fetched.
        for turn in range(2000):
            engine.serve_all(prompts[turn % 2 :: 2])
            engine.settle()
            if turn % 2:
                engine.flush(Tier.DEVICE, Tier.HOST)
            if turn >= 5 and engine.manager.counters.fetched_pages:
                break
        else:
            pytest.fail("nothing ever came from the store")
        engine.assert_all_pages_come_back()


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
def test_the_n_th_call_of_the_backend_fails_for_every_n(policy, tmp_path, monkeypatch):
    """Fault loop: everything finishes, nothing leaks, all bytes are right, whichever call fails."""
    stores = []
    begin = FaultyStore.__init__

    def recorded(self, *args, **options):
        begin(self, *args, **options)
        stores.append(self)

    monkeypatch.setattr(FaultyStore, "__init__", recorded)
    keys = [doc(6, seed=1), doc(5, seed=2)]
    n, num_calls = 0, 1
    while n <= num_calls:
        n += 1
        with Engine(f"faulty+file://{tmp_path}/{n}?fail_nth={n}", policy=policy) as engine:
            for _ in range(2):
                engine.serve_all(keys)
                engine.settle()
                engine.flush(Tier.DEVICE, Tier.HOST)
            engine.assert_all_pages_come_back()
        num_calls = stores[-1].num_calls
    assert n > 5
