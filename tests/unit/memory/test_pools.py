"""Device and host pools: shapes, alignment, views that share memory, clear refusals."""

import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from quire.errors import ConfigError, MemoryBudgetError
from quire.memory import host as host_module
from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.memory.page_layout import BLOCK_BYTES, InnerLayout, PageLayout

LAYOUT = PageLayout("full", 3, 2, 8, "float32", 4)


@pytest.mark.parametrize("inner", InnerLayout)
def test_device_pool_is_layer_first(inner):
    pool = DevicePool.allocate(replace(LAYOUT, inner=inner), 5)
    pool.k(1)[3, 0, 0, 0] = 7.0
    assert pool.k(1).shape == (5, *replace(LAYOUT, inner=inner).inner_shape)
    assert pool.words(1)[0].shape == (5, LAYOUT.chunk_bytes // 8)
    assert pool.words(1)[0][3].any()
    assert not pool.v(1).any()
    assert not pool.k(0).any()


def test_device_pool_takes_an_engines_own_tensors():
    theirs = [torch.zeros(2, 5, *LAYOUT.inner_shape) for _ in range(3)]
    pool = DevicePool(LAYOUT, [layer.unbind(0) for layer in theirs])
    pool.v(2)[4] = 1.0
    assert theirs[2][1, 4].all()


@pytest.mark.parametrize(
    ("planes", "complaint"),
    [
        ([[torch.zeros(5, 4, 2, 8)] * 2] * 2, "2 layers"),
        ([[torch.zeros(5, 4, 2, 8)]] * 3, "1 planes"),
        ([[torch.zeros(5, 4, 2, 9)] * 2] * 3, "layout says"),
        ([[torch.zeros(5, 4, 2, 8, dtype=torch.float64)] * 2] * 3, "float64"),
        ([[torch.zeros(5, 2, 4, 8).transpose(1, 2)] * 2] * 3, "contiguous"),
    ],
)
def test_device_pool_refuses_tensors_that_do_not_fit_the_layout(planes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        DevicePool(LAYOUT, planes)


def test_host_pages_are_aligned_writable_and_zero_copy():
    with closing(HostPool(LAYOUT, 5)) as pool:
        assert pool.data_ptr % BLOCK_BYTES == 0
        view = pool.page_view(3)
        assert len(view) == LAYOUT.page_stride_bytes
        view[:4] = torch.tensor([1.5]).numpy().tobytes()
        assert pool.pages()[3].flatten()[0] == 1.5
        assert not pool.pages()[2].any()
        assert not pool.pinned


def test_host_page_holds_layers_then_planes():
    with closing(HostPool(LAYOUT, 2)) as pool:
        pool.pages()[1, 2, 1] = 3.0  # layer 2, plane V
        words = pool.words(2)
        assert words[1][1].any()
        assert not words[0].any()
        offset = (2 * 2 + 1) * LAYOUT.chunk_bytes
        page = pool.page_view(1)
        assert any(page[offset : offset + LAYOUT.chunk_bytes])
        assert not any(page[:offset])


def test_page_views_are_bounds_checked_and_outlive_close():
    pool = HostPool(LAYOUT, 2)
    view = pool.page_view(1)
    for page in (-1, 2):
        with pytest.raises(IndexError):
            pool.page_view(page)
    pool.close()
    view[0] = 1


def test_prefault_tells_how_far_it_is():
    seen = []
    layout = PageLayout("full", 1, 1, 1 << 20, "uint8", 1, num_planes=1)
    with closing(HostPool(layout, 150, progress=lambda *so_far: seen.append(so_far))):
        pass
    assert seen[-1] == (150 << 20, 150 << 20)
    assert seen == sorted(seen)


class FakeCuda:
    """Registers memory, or refuses from the so-many-th part on."""

    def __init__(self, refuse_from=1000):
        self.refuse_from = refuse_from
        self.registered = {}

    def register(self, memory, device):
        if len(self.registered) >= self.refuse_from:
            raise MemoryBudgetError("no more")
        self.registered[memory.data_ptr()] = memory.numel()

    def cudaHostUnregister(self, address):  # CUDA's name
        del self.registered[address]
        return 0

    def install(self, monkeypatch):
        monkeypatch.setattr(host_module, "_register", self.register)
        monkeypatch.setattr(host_module, "_cudart", lambda: self)
        monkeypatch.setattr(host_module, "_move_near", lambda memory, device: None)
        monkeypatch.setattr(host_module, "_PIN_SLICE_BYTES", 3 * LAYOUT.page_stride_bytes + 1)
        monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
        return self


def test_a_pool_is_pinned_in_parts_of_whole_pages_and_tells_how_far_it_is(monkeypatch):
    cuda, seen = FakeCuda().install(monkeypatch), []
    where = torch.device("cuda")
    pool = HostPool(LAYOUT, 8, pin_for=where, progress=lambda *so_far: seen.append(so_far))
    stride = LAYOUT.page_stride_bytes
    assert cuda.registered == {
        pool.data_ptr: 3 * stride,
        pool.data_ptr + 3 * stride: 3 * stride,
        pool.data_ptr + 6 * stride: 2 * stride,
    }
    assert pool.pinned
    assert seen == sorted(seen)
    assert seen[-1] == (16 * stride, 16 * stride)
    pool.close()
    assert not cuda.registered
    assert not pool.pinned


def test_a_pool_that_cannot_be_pinned_whole_is_not_pinned_at_all(monkeypatch):
    cuda = FakeCuda(refuse_from=2).install(monkeypatch)
    with pytest.raises(MemoryBudgetError):
        HostPool(LAYOUT, 8, pin_for=torch.device("cuda"))
    assert not cuda.registered


def test_a_pool_beyond_the_machine_is_refused_before_anything_is_taken():
    with pytest.raises(MemoryBudgetError, match=r"host pool 'full' asks for .* set host_bytes"):
        HostPool(LAYOUT, 1 << 40)


def test_an_empty_pool_is_a_pool():
    with closing(HostPool(LAYOUT, 0)) as pool, pytest.raises(IndexError):
        pool.page_view(0)


def test_the_leaders_side_of_memory_needs_no_torch():
    modules = "quire.memory.allocator, quire.memory.page_layout, quire.memory.sizing, quire.worker"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_parts_of_a_pool_have_all_its_layers_in_order():
    planes = [[torch.zeros(2, 4, 2, 8)] * 2] * 3
    assert DevicePool(LAYOUT, planes).parts == (range(3),)
    assert DevicePool(LAYOUT, planes, [range(2), range(2, 3)]).parts == (range(2), range(2, 3))
    with pytest.raises(ConfigError, match="all are needed"):
        DevicePool(LAYOUT, planes, [range(2)])
