"""vLLM's KV tensors as its attention backends lay them out, on any device; and round trips."""

from __future__ import annotations

import torch

from quire.integrations.vllm.hands import Hands
from quire.integrations.vllm.orders import Orders, Setup, pack_orders
from quire.integrations.vllm.tensors import BlockShape, KvTensors, describe
from quire.messages import Backup, Load
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
    kv: KvTensors = describe(tensors, shape)
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(dtype))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    hands = Hands(0, 1, kv, 8)
    setup = Setup("weights", 8, shape.tokens)
    source, host, target = [3, 9, 1], [5, 0, 6], [2, 10, 4]
    save = Backup(OperationId(1), "full", page_ids(source), page_ids(host))
    hands.obey(Orders(setup, pack_orders([save]), sending={"r": [OperationId(1)]}))
    hands.finish_copies()
    assert hands.accounts.take_sent() == {"r"}
    load = Load(OperationId(2), "full", page_ids(host), page_ids(target))
    hands.obey(Orders(setup, pack_orders([load]), loads={OperationId(2): "r"}))
    hands.finish_copies()
    if device != "cpu":
        torch.cuda.synchronize()
    assert hands.accounts.take_received() == {"r"}
    assert not hands.accounts.take_bad_blocks()
    for name, tensor in tensors.items():
        for number in range(shape.num_blocks):
            origin = source[target.index(number)] if number in target else number
            got, expected = block(layout, tensor, number), block(layout, before[name], origin)
            assert torch.equal(got, expected), (name, number)
    hands.close()
