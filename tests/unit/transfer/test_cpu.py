"""The CPU copy engine: exact bytes, layer by layer, several at once, failures contained."""

import threading

import pytest
import torch

from quire.errors import WorkerError
from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.memory.page_layout import InnerLayout, PageLayout
from quire.transfer import CopyState, open_copy_engine
from quire.transfer import cpu as cpu_module
from quire.types import NO_PAGES, page_ids

LAYOUT = PageLayout("full", 4, 2, 8, "float32", 4)


class Rig:
    def __init__(self, layout=LAYOUT, num_pages=8):
        self.device = DevicePool.allocate(layout, num_pages)
        self.host = HostPool(layout, num_pages)
        self.engine = open_copy_engine(self.device, self.host)

    def close(self):
        self.engine.close()
        self.host.close()


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def fill_host(rig):
    pages = rig.host.pages()
    pages.copy_(torch.arange(pages.numel(), dtype=torch.float32).view(pages.shape))


def device_page(rig, page):
    """[layers, planes, *inner]"""
    return torch.stack(
        [torch.stack([rig.device.k(i)[page], rig.device.v(i)[page]]) for i in range(4)]
    )


@pytest.mark.parametrize("inner", InnerLayout)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_there_and_back_is_exact(inner, dtype):
    layout = PageLayout("full", 4, 2, 8, dtype, 4, inner)
    rig = Rig(layout)
    rig.host.raw().copy_(torch.randint(0, 256, rig.host.raw().shape, dtype=torch.uint8))
    rig.engine.load(page_ids([5, 0, 3]), page_ids([1, 7, 2])).wait()
    rig.engine.backup(page_ids([2, 1]), page_ids([6, 4])).wait()
    raw = rig.host.raw()[:, : layout.page_bytes]
    assert torch.equal(raw[6], raw[3])
    assert torch.equal(raw[4], raw[5])
    rig.close()


def test_load_puts_each_host_page_into_its_device_page(rig):
    fill_host(rig)
    rig.engine.load(page_ids([5, 0]), page_ids([1, 7])).wait()
    assert torch.equal(device_page(rig, 1), rig.host.pages()[5])
    assert torch.equal(device_page(rig, 7), rig.host.pages()[0])
    assert not device_page(rig, 0).any()


def test_more_pages_than_the_staging_buffer_holds(monkeypatch):
    monkeypatch.setattr(cpu_module, "_STAGING_BYTES", 2 * LAYOUT.chunk_bytes)
    rig = Rig()
    fill_host(rig)
    rig.engine.load(page_ids(range(7)), page_ids(range(7))).wait()
    for page in range(7):
        assert torch.equal(device_page(rig, page), rig.host.pages()[page])
    rig.close()


class HeldRows:
    """Stands in for copy_rows and lets one (layer, plane) through per permit."""

    def __init__(self, real):
        self.real = real
        self.permits = threading.Semaphore(0)

    def __call__(self, *args):
        assert self.permits.acquire(timeout=120)
        self.real(*args)

    def allow_layers(self, count):
        self.permits.release(2 * count)


def test_layer_i_usable_when_layer_i_arrived_c11(rig, monkeypatch):
    held = HeldRows(cpu_module.copy_rows)
    monkeypatch.setattr(cpu_module, "copy_rows", held)
    fill_host(rig)
    copy = rig.engine.load(page_ids([5]), page_ids([1]))
    for layer in range(4):
        assert copy.state is CopyState.RUNNING
        assert not copy.layer_done(layer)
        held.allow_layers(1)
        copy.wait_layer(layer)
        assert copy.layer_done(layer)
        assert torch.equal(rig.device.v(layer)[1], rig.host.pages()[5, layer, 1])
    copy.wait()
    assert copy.state is CopyState.DONE
    assert copy.seconds > 0


def test_load_and_backup_do_not_wait_for_each_other(rig, monkeypatch):
    real, begun, go_on, held = cpu_module.copy_rows, threading.Event(), threading.Event(), []

    def hold_the_first_thread(*args):
        if not held:
            held.append(threading.get_ident())
        if threading.get_ident() == held[0]:
            begun.set()
            assert go_on.wait(timeout=120)
        real(*args)

    monkeypatch.setattr(cpu_module, "copy_rows", hold_the_first_thread)
    load = rig.engine.load(page_ids([5]), page_ids([1]))
    assert begun.wait(timeout=120)
    backup = rig.engine.backup(page_ids([2]), page_ids([3]))
    backup.wait()
    assert (backup.state, load.state) == (CopyState.DONE, CopyState.RUNNING)
    go_on.set()
    load.wait()


def test_several_loads_at_once_each_with_its_own_layers_c11(rig):
    fill_host(rig)
    copies = [rig.engine.load(page_ids([page]), page_ids([7 - page])) for page in range(8)]
    for page, copy in enumerate(copies):
        copy.wait_layer(3)
        assert torch.equal(device_page(rig, 7 - page), rig.host.pages()[page])


def test_a_failing_copy_fails_alone_and_wakes_its_waiters(rig, monkeypatch):
    real = cpu_module.copy_rows
    calls = iter(range(100))

    def broken_at_layer_two(*args):
        if next(calls) == 4:
            raise RuntimeError("no such page")
        real(*args)

    monkeypatch.setattr(cpu_module, "copy_rows", broken_at_layer_two)
    copy = rig.engine.load(page_ids([0]), page_ids([0]))
    with pytest.raises(WorkerError, match="no such page"):
        copy.wait_layer(2)
    copy.wait_layer(1)
    assert copy.state is CopyState.FAILED
    with pytest.raises(WorkerError):
        copy.wait()
    rig.engine.load(page_ids([0]), page_ids([0])).wait()


def test_a_copy_of_no_pages_completes(rig):
    copy = rig.engine.load(NO_PAGES, NO_PAGES)
    copy.wait()
    assert copy.layer_done(3)
