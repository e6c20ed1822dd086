"""WorkerConfig travels, is checked once, and opens workers that fit."""

import msgspec
import pytest

from quire.errors import ConfigError, MemoryBudgetError
from quire.messages import Probe
from quire.worker import ComponentConfig, IoLimits, WorkerConfig, build_worker, open_workers
from unit.worker.fakes import LAYOUT, run


def config(rank=0, num_ranks=1, host_pages=4):
    return WorkerConfig(rank, num_ranks, "m", [ComponentConfig(LAYOUT, 4, host_pages)])


def test_it_travels_as_msgpack():
    data = msgspec.msgpack.encode(config())
    assert msgspec.msgpack.decode(data, type=WorkerConfig) == config()


def test_contradictions_name_the_option():
    with pytest.raises(ConfigError, match="rank 2 is not one of 2"):
        config(2, 2)
    with pytest.raises(ConfigError, match="name one twice"):
        WorkerConfig(0, 1, "m", [ComponentConfig(LAYOUT, 1, 1)] * 2)
    with pytest.raises(ConfigError, match=r"io\.fetch_threads"):
        IoLimits(fetch_threads=0)


def test_a_worker_beyond_the_machine_is_refused():
    with pytest.raises(MemoryBudgetError, match="set host_pages"):
        build_worker(config(host_pages=1 << 40))


def test_a_group_in_this_process():
    group = open_workers([config(0, 2), config(1, 2)])
    done = run(group, Probe(1, "full", [b""], 1.0), num_finals=2)
    assert [c.rank for c in done] == [0, 1]
    group.close()


def test_if_one_rank_does_not_fit_none_is_left_open():
    with pytest.raises(MemoryBudgetError):
        open_workers([config(0, 2), config(1, 2, host_pages=1 << 40)])
