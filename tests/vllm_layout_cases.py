"""vLLM's KV tensors as its attention backends lay them out, on any device; and round trips."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quire.integrations.vllm.hands import Hands
from quire.integrations.vllm.orders import Orders, Setup, pack_orders
from quire.integrations.vllm.tensors import BlockShape, describe
from quire.messages import Backup, Command, Load
from quire.types import OperationId, page_ids

LAYOUTS = ("cpu", "flash_nhd", "flash_hnd", "flashinfer_nhd", "flashinfer_hnd", "packed_nhd")


def tensor_of(layout: str, shape: BlockShape, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros, in the shape that vLLM's code sees and with the strides that its memory has."""
    blocks, tokens, heads, dim = shape.num_blocks, shape.tokens, shape.heads, shape.dim
    sizes, order = {
        "cpu": ((blocks, heads, tokens, 2 * dim), (0, 1, 2, 3)),
        "packed_nhd": ((blocks, tokens, heads, 2 * dim), (0, 2, 1, 3)),
        "flash_nhd": ((2, blocks, tokens, heads, dim), (0, 1, 2, 3, 4)),
        "flash_hnd": ((2, blocks, heads, tokens, dim), (0, 1, 3, 2, 4)),
        "flashinfer_nhd": ((blocks, 2, tokens, heads, dim), (0, 1, 2, 3, 4)),
        "flashinfer_hnd": ((blocks, 2, heads, tokens, dim), (0, 1, 3, 2, 4)),
    }[layout]
    return torch.zeros(sizes, dtype=dtype, device=device).permute(order)


def tensors_of(
    layout: str, shape: BlockShape, layers: int, dtype: torch.dtype, device: str
) -> dict[str, torch.Tensor]:
    return {f"l.{i}": tensor_of(layout, shape, dtype, device) for i in range(layers)}


def block(layout: str, tensor: torch.Tensor, number: int) -> torch.Tensor:
    """What vLLM's kernels see of one block."""
    return tensor[:, number] if layout.startswith("flash_") else tensor[number]


def round_trip(layout: str, device: str, dtype: torch.dtype) -> None:
    """Blocks are saved, overwritten, and loaded into other blocks: bit for bit, and no other."""
    shape = BlockShape(num_blocks=12, tokens=16, heads=2, dim=8)
    tensors = tensors_of(layout, shape, 3, dtype, device)
    fill(tensors.values())
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    hands = Hands(0, 1, [describe([tensors], shape)], [8])
    source, host, target = [3, 9, 1], [5, 0, 6], [2, 10, 4]
    there_and_back(hands, {"full": (source, host, target)})
    for name, tensor in tensors.items():
        for number in range(shape.num_blocks):
            origin = source[target.index(number)] if number in target else number
            got, expected = block(layout, tensor, number), block(layout, before[name], origin)
            assert torch.equal(got, expected), (name, number)
    hands.close()


def round_trip_of_groups(layout: str, device: str, dtype: torch.dtype) -> None:
    """Three groups of layers in one memory: a page of the windows is a block of each of theirs, and
    the second has a layer less. Of each block nothing but its group's layers is touched."""
    shape = BlockShape(num_blocks=12, tokens=16, heads=2, dim=8)
    memory = tensors_of(layout, shape, 2, dtype, device)
    first, second = memory.values()
    fill(memory.values())
    before = [tensor.clone() for tensor in memory.values()]
    full, windows = [{"l.0": first, "l.5": second}], [{"l.1": first, "l.3": second}, {"l.2": first}]
    hands = Hands(0, 1, [describe(full, shape), describe(windows, shape, "window")], [4, 8])
    pages = {"full": ([3], [1], [2]), "window": ([9, 1, 5, 6], [5, 0], [10, 4, 8, 7])}
    there_and_back(hands, pages)
    moved = {10: 9, 4: 1, 8: 5, 7: 6, 2: 3}
    for number in range(shape.num_blocks):
        for at, tensor in enumerate(memory.values()):
            of_second = at == 1 and number in (4, 7)
            origin = number if of_second else moved.get(number, number)
            got, expected = block(layout, tensor, number), block(layout, before[at], origin)
            assert torch.equal(got, expected), (at, number)
    hands.close()


def fill(tensors: Iterable[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


def there_and_back(hands: Hands, pages: dict[str, tuple[list[int], list[int], list[int]]]) -> None:
    """By component: blocks that are saved, to host pages, and blocks into which they are loaded."""
    one, two = OperationId(1), OperationId(2)
    setup = Setup("weights", [p.host.num_pages for p in hands.pools.values()], 16)
    saves: list[Command] = [
        Backup(one, name, page_ids(source), page_ids(host))
        for name, (source, host, _) in pages.items()
    ]
    hands.obey(Orders(setup, pack_orders(saves), sending={"r": [one]}))
    hands.finish_copies(Orders(setup, b"", taken=[one]))
    assert hands.accounts.take_sent() == {"r"}
    loads: list[Command] = [
        Load(two, name, page_ids(host), page_ids(target))
        for name, (_, host, target) in pages.items()
    ]
    hands.obey(Orders(setup, pack_orders(loads), loads={two: "r"}))
    hands.finish_copies(Orders(setup, b"", preempted=True))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert hands.accounts.take_received() == ({"r"}, set())
