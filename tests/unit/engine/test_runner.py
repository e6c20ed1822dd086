"""The runner: what a failed load does to a batch, and models it cannot connect to."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine.attention import open_attention
from quire.engine.batch import Batch, Segment, decode_batch, decode_result, encode
from quire.engine.messages import SamplingParams
from quire.engine.runner import (
    ATTENTION,
    AttentionBridge,
    ModelRunner,
    connect,
    register_attention,
)
from quire.engine.sampling import Row
from quire.errors import ModelError, WorkerError
from quire.memory.device import DevicePool
from quire.memory.layout import PageLayout
from quire.types import OperationId, RequestId, page_ids

LAYERS = 2


class Waiter:
    """Loads that arrive, except those named."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.waited: list[tuple[int, int]] = []

    def wait_layer(self, op, layer, component="full"):
        self.waited.append((op, layer))
        if op in self.lost:
            raise WorkerError("it did not arrive")


@pytest.fixture
def waiter():
    return Waiter()


@pytest.fixture
def model():
    register_attention()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=ATTENTION,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def runner(model, waiter):
    pool = DevicePool.allocate(PageLayout("full", LAYERS, 2, 8, "float32", 4), 32)
    bridge = AttentionBridge(open_attention("torch", pool), waiter)
    connect(model, bridge, LAYERS)
    return ModelRunner(model, bridge, page_size=4, device=torch.device("cpu"))


def segment(name: str, start: int, tokens: list[int], first_page: int, *, loads=(), last=True):
    pages = range(first_page, first_page + -(-(start + len(tokens)) // 4))
    row = Row(params=SamplingParams(max_tokens=1, temperature=0), position=0) if last else None
    ids = np.array(tokens, dtype="<i4").tobytes()
    loads = [OperationId(op) for op in loads]
    return Segment(RequestId(name), ids, start, page_ids(list(pages)), loads, row)


def test_a_prompt_in_pieces_gives_the_token_of_the_whole(runner):
    tokens = [7, 3, 9, 11, 2, 5, 8]
    (whole,) = runner.run(Batch(1, [segment("a", 0, tokens, 0)])).results
    runner.run(Batch(2, [segment("b", 0, tokens[:5], 10, last=False)]))
    (rest,) = runner.run(Batch(3, [segment("b", 5, tokens[5:], 10)])).results
    assert rest == whole
    assert whole.sampled is not None


def test_only_segments_with_a_row_get_a_token(runner):
    batch = Batch(1, [segment("a", 0, [1, 2], 0, last=False), segment("b", 0, [3], 4)])
    first, second = runner.run(batch).results
    assert first.sampled is None
    assert second.sampled is not None


def test_every_layer_is_waited_for_and_a_lost_load_fails_its_segments_only(runner, waiter):
    waiter.lost = {7}
    batch = Batch(
        1,
        [
            segment("a", 4, [1], 0, loads=[7]),
            segment("b", 4, [1], 4, loads=[8]),
            segment("c", 0, [1], 8),
        ],
    )
    lost, arrived, alone = runner.run(batch).results
    assert lost.failed == "it did not arrive"
    assert lost.sampled is None
    assert not arrived.failed
    assert not alone.failed
    assert {(8, layer) for layer in range(LAYERS)} <= set(waiter.waited)


def test_a_batch_and_its_result_survive_the_wire(runner):
    batch = Batch(5, [segment("a", 0, [1, 2], 0, loads=[3])])
    assert decode_batch(encode(batch)) == batch
    result = runner.run(Batch(6, [segment("a", 0, [1, 2], 0)]))
    assert decode_result(encode(result)) == result


def test_a_model_with_other_layers_is_refused(model, waiter):
    with pytest.raises(ModelError, match="cannot be served"):
        connect(model, AttentionBridge(None, waiter), LAYERS + 1)
