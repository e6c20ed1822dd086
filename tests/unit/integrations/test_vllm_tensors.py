"""vLLM's layouts: each block is one page, whatever the shape and the strides."""

import pytest
import torch

from quire.errors import ConfigError
from quire.integrations.vllm.tensors import BlockShape, describe
from vllm_layout_cases import LAYOUTS, round_trip, tensors_of

SHAPE = BlockShape(num_blocks=6, tokens=16, heads=2, dim=8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_comes_back_bit_for_bit_and_no_other_changes(layout: str) -> None:
    round_trip(layout, "cpu", torch.bfloat16)


def test_pages_that_mean_something_else_have_another_name() -> None:
    names = set()
    for one in LAYOUTS:
        kv = describe(tensors_of(one, SHAPE, 3, torch.bfloat16, "cpu"), SHAPE)
        names.add(kv.layout.fingerprint(kv.fingerprint("weights")))
    assert len(names) == len(LAYOUTS)


def test_latent_attention_has_one_plane() -> None:
    shape = BlockShape(num_blocks=6, tokens=16, heads=1, dim=40)
    kv = describe({"l.0": torch.zeros(6, 16, 40)}, shape)
    assert (kv.layout.num_planes, kv.layout.head_dim) == (1, 40)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"l.0": torch.zeros(6, 3, 5)}, "does not know"),
        ({"l.0": torch.zeros(16, 2, 6, 16).permute(2, 1, 0, 3)}, "must lie together"),
        (
            {"l.0": torch.zeros(6, 2, 16, 16), "l.1": torch.zeros(6, 2, 16, 16).half()},
            "differ",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(tensors: dict[str, torch.Tensor], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        describe(tensors, SHAPE)
