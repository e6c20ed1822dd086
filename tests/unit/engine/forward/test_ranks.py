"""A dense model in parts: together they compute the whole, and no rank reads more than its part."""

import itertools
import threading

import pytest
import torch

from dense_models import DENSE
from quire.engine.attention import open_attention
from quire.engine.batch import Batch, Segment
from quire.engine.bridge import AttentionBridge
from quire.engine.forward import dense_weights
from quire.engine.forward.dense import DenseForward, DenseModel, load_dense
from quire.engine.layouts import layouts
from quire.engine.parallel import head_share
from quire.memory.device import DevicePool
from quire.models import describe
from quire.types import RequestId, page_ids
from thread_ranks import ThreadRanks
from unit.engine.hybrid_rank import PAGE, ROW, stock_model

CPU = torch.device("cpu")
NUM_PAGES = 32
TOKENS = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def load(directory, rank, num_ranks) -> DenseModel:
    return load_dense(directory, dtype=torch.float32, device=CPU, rank=rank, num_ranks=num_ranks)


class NothingToLoad:
    def wait_layer(self, op, layer, component="full"):
        raise AssertionError("there are no loads")


def forward(directory, rank, num_ranks, all_reduce) -> DenseForward:
    shape = describe(directory)
    first, last = head_share(shape, rank, num_ranks)
    windows = {"full": 0, "window": shape.window}
    backends = {
        layout.component: open_attention(
            "torch", DevicePool.allocate(layout, NUM_PAGES), windows[layout.component]
        )
        for layout in layouts(shape, dtype="float32", page_size=PAGE, kv_heads=last - first)
    }
    bridge = AttentionBridge(backends, shape, NothingToLoad(), page_size=PAGE)
    return DenseForward(load(directory, rank, num_ranks), bridge, all_reduce)


def chunk(start: int, end: int) -> Batch:
    ids = torch.tensor(TOKENS[start:end], dtype=torch.int32).numpy().tobytes()
    pages = page_ids(range(-(-end // PAGE)))
    return Batch(1, [Segment(RequestId("a"), ids, start, pages, [], ROW, window=pages)])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", DENSE)
def test_the_parts_add_up_to_the_whole(name, num_ranks, tmp_path):
    """Three key-value heads: on two ranks one has two of them. Chunks, then one by one."""
    directory = DENSE[name](tmp_path)
    with torch.inference_mode():
        expected = stock_model(directory)(input_ids=torch.tensor([TOKENS])).logits[0]
    cuts = [0, 33, 50, *range(51, len(TOKENS) + 1)]
    meeting = ThreadRanks(num_ranks)
    found: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        part = forward(directory, rank, num_ranks, meeting.add_up(rank))
        with torch.inference_mode():
            steps = itertools.pairwise(cuts)
            found[rank] = torch.cat([part.logits(chunk(*step)) for step in steps])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(num_ranks):
        ends = torch.tensor(cuts[1:]) - 1
        torch.testing.assert_close(found[rank], expected[ends], rtol=1e-5, atol=3e-5)
        assert torch.equal(found[rank].argmax(-1), expected[ends].argmax(-1))


def tensors(model: DenseModel) -> list[torch.Tensor]:
    found = [model.weights.embedding, model.weights.norm, model.weights.head]
    for layer in model.weights.layers:
        for field in layer.__dataclass_fields__:
            value = getattr(layer, field)
            linear = isinstance(value, dense_weights.Linear)
            found += [value.weight, value.bias] if linear else [value]
    return [tensor for tensor in found if tensor is not None]


def size_bytes(model: DenseModel) -> int:
    """Of the memory behind the weights, whoever shares it. What is packed does not tell: it is its
    own, and of its own size."""
    opaque = [tensor for tensor in tensors(model) if tensor.is_mkldnn]
    open_ = [tensor for tensor in tensors(model) if not tensor.is_mkldnn]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in open_}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values()) + sum(
        tensor.numel() * tensor.element_size() for tensor in opaque
    )


def test_weights_are_in_memory_once_and_nothing_beside_them(tmp_path):
    """Merged matrices have no second copy, and a tied head is the embedding."""
    for name in ("llama", "llama_biases"):
        directory = DENSE[name](tmp_path / name)
        assert size_bytes(load(directory, 0, 1)) == describe(directory).weight_bytes


def test_no_rank_reads_what_is_not_its_part(tmp_path, monkeypatch):
    directory = DENSE["qwen2_windows"](tmp_path)
    read_bytes = 0
    open_file = dense_weights.safe_open

    class Slice:
        def __init__(self, of) -> None:
            self._of = of

        def __getitem__(self, index):
            nonlocal read_bytes
            tensor = self._of[index]
            read_bytes += tensor.nbytes
            return tensor

    class File:
        def __init__(self, *args, **options) -> None:
            self._file = open_file(*args, **options)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def get_slice(self, name):
            return Slice(self._file.get_slice(name))

    monkeypatch.setattr(dense_weights, "safe_open", File)
    everything = describe(directory).weight_bytes
    parts = [load(directory, rank, 3) for rank in range(3)]
    shared = parts[0].weights.embedding.nbytes * 2  # with the head
    for part in parts:
        own = size_bytes(part)
        assert own < shared + (everything - shared) * 0.36
    assert read_bytes == sum(size_bytes(part) for part in parts)
