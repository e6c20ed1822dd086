"""The runner: what a failed load does to a batch, and models it cannot connect to."""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from quire.engine.attention import open_attention
from quire.engine.batch import Batch, Segment, decode_batch, decode_result, encode
from quire.engine.bridge import AttentionBridge
from quire.engine.forward.transformers import (
    ATTENTION,
    TransformersForward,
    connect,
    register_attention,
)
from quire.engine.messages import SamplingParams
from quire.engine.runner import ModelRunner
from quire.engine.sampling import Row, open_sampler
from quire.errors import ModelError, WorkerError
from quire.memory.device import DevicePool
from quire.memory.page_layout import PageLayout
from quire.models import ModelShape
from quire.types import OperationId, RequestId, page_ids

LAYERS = 2


def shape(num_layers: int = LAYERS) -> ModelShape:
    return ModelShape("test", num_layers, 4, 2, 8, 50, 64, 0, 0, tuple(range(num_layers)))


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
def bridge(waiter):
    pool = DevicePool.allocate(PageLayout("full", LAYERS, 2, 8, "float32", 4), 32)
    return AttentionBridge({"full": open_attention("torch", pool)}, shape(), waiter, page_size=4)


@pytest.fixture
def runner(model, bridge):
    device = torch.device("cpu")
    return ModelRunner(
        TransformersForward(model, bridge), open_sampler(device, vocab_size=100, max_rows=8)
    )


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
        connect(model, AttentionBridge({}, shape(LAYERS + 1), waiter, page_size=4))


class Attention(torch.nn.Module):
    """One that passes on what it is told to."""

    layer_idx = 0
    is_causal = True

    def forward(self, **options):
        query, key = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8)
        return AttentionInterface()[ATTENTION](self, query, key, key, None, **options)


@pytest.fixture
def attention(bridge):
    register_attention()
    module = Attention()
    setattr(module, "_quire_bridge", bridge)  # noqa: B010
    bridge.begin(Batch(1, [segment("a", 0, [1], 0)]))
    return module


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 50.0}, "'softcap'"),
        ({"position_bias": torch.zeros(1)}, "'position_bias'"),
        ({"is_causal": False}, "looks ahead"),
        ({"sliding_window": 16}, "a window of 16 tokens"),
    ],
)
def test_what_a_model_wants_of_attention_is_refused_rather_than_left_out(
    attention, options, reason
):
    with pytest.raises(ModelError, match=reason):
        attention(**options)


def test_what_changes_nothing_is_let_through(attention):
    output, _ = attention(
        softcap=None, sliding_window=64, is_causal=True, dropout=0.0, output_router_logits=False
    )
    assert output.shape == (1, 1, 4, 8)
