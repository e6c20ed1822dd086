"""On a real device: exact bytes both ways, order between streams, a worker end to end."""

from contextlib import closing
from functools import partial

import pytest
import torch

from quire.bench.transfer import run as run_bench
from quire.errors import ConfigError, WorkerError
from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.memory.page_layout import InnerLayout, PageLayout, llama_3_1_8b
from quire.messages import AttachStore, Backup, Fetch, Load, Run, Write
from quire.transfer import CopyState, MoverKind, open_copy_engine
from quire.transfer.choice import Chosen, _open, choose
from quire.transfer.cuda import CudaCopyEngine, ends_of
from quire.transfer.movers import Move
from quire.types import NO_PAGES, PageStatus, page_ids
from quire.worker import ComponentConfig, WorkerConfig, build_worker
from transfer_cases import LAYOUTS, check_mover
from unit.worker.fakes import keys, run, statuses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUT = PageLayout("full", 4, 2, 64, "bfloat16", 16)
LONG_CYCLES = 500_000_000
"""A few tenths of a second on the device: work that is certainly not over when we go on."""


KINDS = [kind for kind in MoverKind if kind is not MoverKind.AUTO]


class Rig:
    def __init__(self, layout=LAYOUT, num_pages=32, kind=MoverKind.AUTO):
        self.device = DevicePool.allocate(layout, num_pages, "cuda")
        self.host = HostPool(layout, num_pages, pin_for=self.device.device)
        self.engine = open_copy_engine(self.device, self.host, kind)

    def close(self):
        self.engine.close()
        self.host.close()


@pytest.fixture(params=KINDS)
def rig(request):
    rig = Rig(kind=request.param)
    yield rig
    rig.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_mover_moves_these_bytes_and_no_others(kind, layout, seed):
    check_mover(partial(_open, kind), layout, "cuda", seed, groups=2)


def test_the_choice_is_measured_and_says_why():
    rig = Rig(llama_3_1_8b(64), num_pages=16)
    chosen = choose(ends_of(rig.device, rig.host), MoverKind.AUTO)
    assert "plain" in chosen.reason
    engines = (MoverKind.RECTANGLES, MoverKind.PIECES, MoverKind.STAGED)
    assert chosen.loads.kind in engines, chosen.reason
    rig.close()


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "smollm2-135m"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_every_layout_is_exact_in_both_directions(shape, page_size):
    result = run_bench("cuda", [shape], [page_size], pages=9, repeats=1)
    assert result["ok"], result
    assert {case["inner"] for case in result["cases"]} == {"nhd", "hnd"}


@pytest.mark.parametrize("inner", InnerLayout)
@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 64), ("float8_e4m3fn", 5)])
def test_any_element_and_word_size(inner, dtype, head_dim):
    rig = Rig(PageLayout("full", 2, 3, head_dim, dtype, 3, inner))
    rig.host.raw().copy_(torch.randint(0, 256, rig.host.raw().shape, dtype=torch.uint8))
    rig.engine.load(page_ids([5, 0, 31]), page_ids([1, 7, 2])).wait()
    rig.engine.backup(page_ids([2, 1]), page_ids([6, 4])).wait()
    raw = rig.host.raw()[:, : rig.host.layout.page_bytes]
    assert torch.equal(raw[6], raw[31])
    assert torch.equal(raw[4], raw[5])
    rig.close()


def test_host_memory_is_pinned_and_let_go():
    for _ in range(2):
        rig = Rig()
        assert rig.host.pinned
        assert rig.host.raw().is_pinned()
        rig.close()
        assert not rig.host.raw().is_pinned()


def test_an_unpinned_host_pool_is_refused():
    device = DevicePool.allocate(LAYOUT, 2, "cuda")
    with closing(HostPool(LAYOUT, 2)) as host, pytest.raises(ConfigError, match="pin_for"):
        open_copy_engine(device, host)


def test_backup_waits_for_the_work_that_produces_the_pages(rig):
    torch.cuda._sleep(LONG_CYCLES)
    rig.device.k(3)[5] = 7.0
    copy = rig.engine.backup(page_ids([5]), page_ids([9]))
    copy.wait()
    assert (rig.host.pages()[9, 3, 0] == 7.0).all()


def test_load_waits_for_earlier_readers_of_the_pages(rig):
    rig.device.k(0)[5] = 1.0
    rig.host.pages()[9] = 2.0
    torch.cuda._sleep(LONG_CYCLES)
    read_before = rig.device.k(0)[5].clone()
    rig.engine.load(page_ids([9]), page_ids([5])).wait()
    assert (read_before == 1.0).all()
    assert (rig.device.k(0)[5] == 2.0).all()


def test_the_fence_is_on_the_callers_own_stream(rig):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_CYCLES)
        rig.device.v(0)[1] = 3.0
        copy = rig.engine.backup(page_ids([1]), page_ids([1]))
    copy.wait()
    assert (rig.host.pages()[1, 0, 1] == 3.0).all()


def test_layer_i_usable_when_layer_i_arrived_c11(rig):
    rig.host.pages().copy_(torch.arange(32 * 4).view(32, 4, 1, 1, 1, 1).float())
    torch.cuda._sleep(LONG_CYCLES)  # the load cannot have begun
    copy = rig.engine.load(page_ids([9, 3]), page_ids([5, 6]))
    assert copy.state is CopyState.RUNNING
    taken = []
    for layer in range(4):
        copy.wait_layer(layer)  # the stream waits; this thread goes on and launches
        taken.append(rig.device.k(layer)[[5, 6]].clone())
    torch.cuda.synchronize()
    for layer, pages in enumerate(taken):
        assert (pages[0] == 9 * 4 + layer).all()
        assert (pages[1] == 3 * 4 + layer).all()
    assert copy.state is CopyState.DONE
    assert all(copy.layer_done(layer) for layer in range(4))
    assert copy.seconds > 0


def test_many_copies_at_once_in_both_directions_c11(rig):
    rig.host.raw().copy_(torch.randint(0, 256, rig.host.raw().shape, dtype=torch.uint8))
    before = rig.host.raw().clone()
    loads = [rig.engine.load(page_ids([page]), page_ids([15 - page])) for page in range(16)]
    for copy in loads:
        copy.wait()
    backups = [
        rig.engine.backup(page_ids([15 - page]), page_ids([16 + page])) for page in range(16)
    ]
    more = [rig.engine.load(page_ids([page]), page_ids([16 + page])) for page in range(16)]
    for copy in backups + more:
        copy.wait()
    size = LAYOUT.page_bytes
    assert torch.equal(rig.host.raw()[16:, :size], before[:16, :size])


class Failing:
    """Moves the first layer, slowly, and then cannot go on."""

    kind = MoverKind.INDEX

    def plan(self, device_pages, host_pages):
        def launch(layers):
            if layers.start:
                raise RuntimeError("no more")
            torch.cuda._sleep(LONG_CYCLES)

        return Move(launch, 1)


def test_a_copy_that_fails_half_way_has_stopped_when_it_says_so(rig):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        engine = CudaCopyEngine(rig.device, Chosen(Failing(), Failing(), "to fail"))
        copy = engine.load(page_ids([1]), page_ids([1]))
    with pytest.raises(WorkerError, match="no more"):
        copy.wait()
    assert copy.state is CopyState.FAILED
    assert engine._loads._stream.query()
    engine.close()


def test_a_copy_of_no_pages_completes(rig):
    rig.engine.load(NO_PAGES, NO_PAGES).wait()


def test_a_worker_end_to_end_through_a_store(tmp_path):
    worker = build_worker(WorkerConfig(0, 1, "m", [ComponentConfig(LAYOUT, 16, 32)], "cuda"))
    run(worker, AttachStore(1, f"file://{tmp_path}/store"))
    device = worker.components["full"].device
    for layer in range(4):
        device.k(layer)[:4] = torch.randn(device.k(layer)[:4].shape).to(device.k(layer))
    four = b"".join(keys(4))
    for command in (
        Backup(2, "full", page_ids(range(4)), page_ids(range(4))),
        Write(3, "full", page_ids(range(4)), [Run(keys=four)], 60.0),
        Fetch(4, "full", four, page_ids(range(20, 24)), 60.0),
    ):
        assert statuses(run(worker, command), command.op) == [PageStatus.OK] * 4
    worker.submit([Load(5, "full", page_ids(range(20, 24)), page_ids(range(8, 12)))])
    for layer in range(4):
        worker.wait_layer(5, layer)
        assert torch.equal(device.k(layer)[8:12], device.k(layer)[:4])
    assert statuses(run(worker, num_finals=1), 5) == [PageStatus.OK] * 4
    worker.close()
