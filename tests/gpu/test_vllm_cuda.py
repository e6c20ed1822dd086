"""vLLM's layouts on a real device: tensors laid out as its own, without vLLM."""

import pytest
import torch

from vllm_layout_cases import LAYOUTS, round_trip, round_trip_of_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_comes_back_bit_for_bit_and_no_other_changes(layout, dtype):
    if dtype is torch.float8_e4m3fn and layout != "flash_nhd":
        pytest.skip("one will do: copies move words")
    round_trip(layout, "cuda", dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_block_the_layers_of_its_group_are_saved_and_loaded(layout):
    round_trip_of_groups(layout, "cuda", torch.bfloat16)
