"""vLLM's layouts: each block is one page, whatever the shape and the strides."""

import pytest
import torch

from quire.errors import ConfigError
from quire.integrations.vllm.tensors import BlockShape, describe, fingerprint
from vllm_layout_cases import LAYOUTS, round_trip, round_trip_of_groups, tensors_of

SHAPE = BlockShape(num_blocks=6, tokens=16, heads=2, dim=8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_comes_back_bit_for_bit_and_no_other_changes(layout: str) -> None:
    round_trip(layout, "cpu", torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_block_the_layers_of_its_group_are_saved_and_loaded(layout: str) -> None:
    round_trip_of_groups(layout, "cpu", torch.bfloat16)


def test_layers_in_another_order_have_another_name() -> None:
    """vLLM may group them otherwise one day."""
    tensors = tensors_of("cpu", SHAPE, 4, torch.bfloat16, "cpu")
    names, found = list(tensors), set()
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        by_group = [names[at] for at in order]
        groups = [{n: tensors[n] for n in half} for half in (by_group[:2], by_group[2:])]
        found.add(fingerprint("weights", [describe(groups, SHAPE, "window")]))
    assert len(found) == 2


def test_pages_that_mean_something_else_have_another_name() -> None:
    names = set()
    for one in LAYOUTS:
        kv = describe([tensors_of(one, SHAPE, 3, torch.bfloat16, "cpu")], SHAPE)
        names.add(kv.layout.fingerprint(fingerprint("weights", [kv])))
    assert len(names) == len(LAYOUTS)


def test_latent_attention_has_one_plane() -> None:
    shape = BlockShape(num_blocks=6, tokens=16, heads=1, dim=40)
    kv = describe([{"l.0": torch.zeros(6, 16, 40)}], shape)
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
        describe([tensors], SHAPE)
