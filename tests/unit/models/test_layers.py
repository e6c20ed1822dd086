"""Which layers keep what, and the bytes of a recurrent layer's state."""

import pytest
import transformers

from hybrid_models import TINY
from quire.engine.layouts import layouts
from quire.models import StateShape, describe
from quire.models.layers import layers_of

LAYERS = {
    # full, window, recurrent
    "falcon_h1": ((0, 1), (), (0, 1)),
    "nemotron_h": ((2,), (), (0, 4)),
    "qwen3_next": ((3,), (), (0, 1, 2)),
    "granite_moe_hybrid": ((1,), (), (0, 2)),
    "lfm2": ((1,), (), (0, 2, 3)),
    "gemma3": ((1, 3), (0, 2), ()),
    "gpt_oss": ((1, 3), (0, 2), ()),
}


@pytest.mark.parametrize("name", TINY)
def test_the_layers_of_a_model_and_its_pools(name, tmp_path):
    shape = describe(TINY[name](tmp_path))
    found = (shape.full_layers, shape.window_layers, shape.recurrent_layers)
    assert found == LAYERS[name]
    assert shape.window == (24 if shape.window_layers else 0)
    made = layouts(shape, dtype="bfloat16", page_size=8, kv_heads=1)
    names = [n for n, layers in zip(("full", "window", "recurrent"), found, strict=True) if layers]
    assert [layout.component for layout in made] == names
    assert [layout.num_layers for layout in made] == [len(layers) for layers in found if layers]
    assert all(layout.num_kv_heads == 1 for layout in made)
    if shape.recurrent_layers:
        assert made[-1].page_bytes == len(shape.recurrent_layers) * shape.state_bytes("bfloat16")
    else:
        assert shape.state_bytes("bfloat16") == 0


def test_each_part_of_a_state_begins_and_ends_on_sixteen_bytes():
    layout = StateShape((5, 3), (1, 3, 3)).layout("bfloat16")
    assert (layout.conv.offset, layout.conv.size_bytes) == (0, 30)
    assert layout.recurrent is not None
    assert (layout.recurrent.offset, layout.recurrent.size_bytes) == (32, 36)
    assert layout.recurrent.dtype == "float32"
    assert layout.size_bytes == 32 + 48
    assert StateShape((5, 3), None).layout("float32").size_bytes == 64


@pytest.mark.parametrize(("name", "mib"), [("Qwen3Next", 73.7), ("NemotronH", 97.4)])
def test_states_of_real_models_are_as_large_as_is_known(name, mib, tmp_path):
    from quire.models.recurrence import state_shape

    options = {"hybrid_override_pattern": "M" * 24 + "*"} if name == "NemotronH" else {}
    config = getattr(transformers, f"{name}Config")(**options)
    num_layers = {"Qwen3Next": 36, "NemotronH": 24}[name]
    total = num_layers * state_shape(config).layout("bfloat16").size_bytes
    assert total / 2**20 == pytest.approx(mib, rel=0.01)


@pytest.mark.parametrize("window", [2048, 4096])
def test_a_window_over_everything_is_no_window(window):
    config = transformers.Gemma3TextConfig(sliding_window=window, max_position_embeddings=2048)
    layers = layers_of(config)
    assert layers.window == ()
    assert layers.window_tokens == 0
    assert layers.full == tuple(range(config.num_hidden_layers))
