"""Movers against the definition of a copy: on CUDA, and on a CPU (kernels in Triton's interpreter).

Random pages of random bytes, in an order of their own on each side; every other byte of both pools
is poison, and must still be there afterwards.
"""

from contextlib import closing, nullcontext

import numpy as np
import torch

from quire.memory.device import DevicePool, word_dtype
from quire.memory.host import HostPool
from quire.memory.page_layout import InnerLayout, PageLayout
from quire.transfer.movers import Ends

POISON = 0xA5
LAYOUTS = [
    PageLayout("full", 4, 2, 64, "float32", 16),
    PageLayout("full", 3, 2, 8, "bfloat16", 4, InnerLayout.HND),
    PageLayout("full", 2, 3, 5, "float8_e4m3fn", 3),  # words of one byte, and padded host pages
    PageLayout("full", 2, 3, 128, "float16", 5),  # a chunk that is no power of two
    PageLayout("recurrent", 1, 1, 4104, "uint8", 1, num_planes=1),
]
NUM_PAGES = 12


class Pools:
    def __init__(self, layout, where, seed):
        self.layout = layout
        self.device = DevicePool.allocate(layout, NUM_PAGES + 3, where)
        pin_for = self.device.device if where == "cuda" else None
        self.host = HostPool(layout, NUM_PAGES, pin_for=pin_for)
        self.host.raw().fill_(POISON)
        for layer in range(layout.num_layers):
            for plane in self.device.words(layer):
                plane.view(torch.uint8).fill_(POISON)
        chance = np.random.default_rng(seed)
        count = int(chance.integers(1, NUM_PAGES))
        self.device_pages = chance.permutation(NUM_PAGES + 3)[:count].astype(np.int32)
        self.host_pages = chance.permutation(NUM_PAGES)[:count].astype(np.int32)
        generator = torch.Generator().manual_seed(seed)
        self.expected = torch.randint(
            0, 256, (count, layout.page_bytes), dtype=torch.uint8, generator=generator
        )

    def ends(self):
        if self.device.device.type == "cuda":
            from quire.transfer.cuda import ends_of

            return ends_of(self.device, self.host)
        raw = self.host.raw()
        return Ends(self.device, raw.view(word_dtype(self.layout)), raw)

    def close(self):
        self.host.close()

    def device_bytes(self):
        """[num_pages, page_bytes]"""
        planes = [
            plane.contiguous().view(torch.uint8).cpu()
            for layer in range(self.layout.num_layers)
            for plane in self.device.words(layer)
        ]
        return torch.cat(planes, dim=1)

    def fill_device(self):
        pages, size = torch.from_numpy(self.device_pages).long(), self.layout.chunk_bytes
        planes = [
            plane for layer in range(self.layout.num_layers) for plane in self.device.words(layer)
        ]
        for i, plane in enumerate(planes):
            rows = self.expected[:, i * size : (i + 1) * size].contiguous().view(plane.dtype)
            plane[pages.to(plane.device)] = rows.to(plane.device)


def check_mover(open_mover, layout, where, seed, groups):
    """`groups`: into how many launches its layers are cut."""
    for to_device in (True, False):
        with closing(Pools(layout, where, seed)) as pools:
            if to_device:
                pools.host.raw()[pools.host_pages, : layout.page_bytes] = pools.expected
            else:
                pools.fill_device()
            if where == "cuda":
                torch.cuda.synchronize()
            before = pools.device_bytes(), pools.host.raw().clone()
            with torch.cuda.stream(torch.cuda.Stream()) if where == "cuda" else nullcontext():
                move = open_mover(pools.ends(), to_device=to_device).plan(
                    pools.device_pages, pools.host_pages
                )
                parts = np.array_split(np.arange(layout.num_layers), groups)
                for layers in filter(len, parts):
                    move.launch(range(int(layers[0]), int(layers[-1]) + 1))
            if where == "cuda":
                torch.cuda.synchronize()
            wanted = [before[0].clone(), before[1].clone()]
            if to_device:
                wanted[0][pools.device_pages] = pools.expected
            else:
                wanted[1][pools.host_pages, : layout.page_bytes] = pools.expected
            assert torch.equal(pools.device_bytes(), wanted[0])
            assert torch.equal(pools.host.raw(), wanted[1])
