"""PageLayout: sizes, and a fingerprint that tells any two meanings apart."""

from dataclasses import replace

import msgspec
import pytest

from quire.errors import ConfigError
from quire.memory.page_layout import (
    BLOCK_BYTES,
    InnerLayout,
    PageLayout,
    llama_3_1_8b,
    smollm2_135m,
)

SMALL = PageLayout("full", 3, 2, 8, "float32", 4)


def test_named_shapes_have_the_known_bytes_per_token():
    assert llama_3_1_8b(1).page_bytes == 131_072
    assert smollm2_135m(1, "bfloat16").page_bytes == 23_040
    assert llama_3_1_8b(16).page_stride_bytes == llama_3_1_8b(16).page_bytes == 2 << 20


def test_host_pages_are_whole_blocks():
    assert SMALL.page_bytes == 3 * 2 * 4 * 2 * 8 * 4
    assert SMALL.page_stride_bytes == BLOCK_BYTES
    assert replace(SMALL, page_size=64).page_stride_bytes % BLOCK_BYTES == 0


def test_inner_shape_follows_the_layout():
    assert SMALL.inner_shape == (4, 2, 8)
    assert replace(SMALL, inner=InnerLayout.HND).inner_shape == (2, 4, 8)


@pytest.mark.parametrize(
    "change",
    [
        {"component": "draft"},
        {"num_layers": 4},
        {"num_kv_heads": 4},
        {"head_dim": 16},
        {"dtype": "bfloat16"},
        {"page_size": 8},
        {"inner": InnerLayout.HND},
        {"num_planes": 1},
    ],
)
def test_every_field_changes_the_fingerprint(change):
    assert replace(SMALL, **change).fingerprint("m") != SMALL.fingerprint("m")


def test_the_model_changes_the_fingerprint_and_fields_cannot_alias():
    assert len(SMALL.fingerprint("m")) == 32
    assert SMALL.fingerprint("m") == replace(SMALL).fingerprint("m")
    assert SMALL.fingerprint("m") != SMALL.fingerprint("n")
    # Without length prefixes "m" + "full" and "mf" + "ull" would be the same bytes.
    assert SMALL.fingerprint("m") != replace(SMALL, component="ull").fingerprint("mf")


@pytest.mark.parametrize(("chunk", "word"), [(8, 8), (12, 4), (6, 2), (5, 1)])
def test_words_are_the_widest_that_fit(chunk, word):
    assert PageLayout("full", 1, 1, chunk, "uint8", 1).word_bytes == word


def test_a_recurrent_snapshot_is_one_blob_per_page():
    snapshot = PageLayout("recurrent", 1, 1, 73_700_000, "uint8", 1, num_planes=1)
    assert snapshot.page_bytes == 73_700_000


def test_wrong_fields_are_refused_by_name():
    with pytest.raises(ConfigError, match="int3"):
        replace(SMALL, dtype="int3")
    with pytest.raises(ConfigError, match="num_layers is 0"):
        replace(SMALL, num_layers=0)


def test_it_travels_as_msgpack():
    data = msgspec.msgpack.encode(SMALL)
    assert msgspec.msgpack.decode(data, type=PageLayout) == SMALL
