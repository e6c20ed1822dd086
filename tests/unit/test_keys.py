"""PrefixKey, Namespace and the page-key chain (C1, C3, C4)."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from quire import keys as keys_module
from quire.config import CacheConfig
from quire.errors import ConfigError
from quire.keys import PrefixKey, UnitKind
from quire.manager import CacheManager
from quire.types import split_keys
from support import PAGE, namespace, tokens_for

UNITS = list(UnitKind)


@pytest.mark.parametrize("unit", UNITS)
def test_slices_agree_with_units_written_out_c1(unit: UnitKind) -> None:
    tokens = tokens_for(5, seed=1, unit=unit, extra=2)
    key = PrefixKey(namespace(unit), tokens)
    assert key.num_pages == 5
    for first in range(6):
        for last in range(first, 6):
            part = key[first:last]
            wanted = tokens[first * PAGE : last * PAGE + unit.overlap] if first < last else []
            assert part.tokens.tolist() == wanted
            assert part.num_pages == last - first
            assert part.page_keys() == key.page_keys(first, last)


@pytest.mark.parametrize("unit", UNITS)
def test_too_few_tokens_for_a_page_is_an_empty_valid_key_c1(unit: UnitKind) -> None:
    manager = CacheManager(
        CacheConfig(page_size=PAGE, device_pages=8, host_pages=0), clock=lambda: 0.0
    )
    for count in range(PAGE + unit.overlap):
        key = PrefixKey(namespace(unit), tokens_for(1, seed=1)[:count])
        assert key.num_pages == 0
        assert key.page_keys() == b""
        assert key[0:0].tokens.size == 0
        match = manager.match(key)
        assert (match.num_device, match.num_host) == (0, 0)


@pytest.mark.parametrize("unit", UNITS)
def test_common_pages_counts_whole_equal_pages_c1(unit: UnitKind) -> None:
    left = tokens_for(6, seed=2, unit=unit)
    for differs_at in range(len(left)):
        right = left.copy()
        right[differs_at] += 1
        a, b = PrefixKey(namespace(unit), left), PrefixKey(namespace(unit), right)
        same_units = max(0, differs_at - unit.overlap)
        assert a.common_pages(b) == b.common_pages(a) == same_units // PAGE
    assert a.common_pages(PrefixKey(namespace(unit), left)) == 6


def test_neighbouring_pair_pages_share_one_token_c1() -> None:
    key = PrefixKey(namespace(UnitKind.PAIR), range(9))
    assert key[0:1].tokens.tolist() == [0, 1, 2, 3, 4]
    assert key[1:2].tokens.tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "other"},
        {"kv_dtype": "bfloat16"},
        {"page_size": PAGE * 2},
        {"adapter": "lora-1"},
        {"salt": "tenant"},
    ],
)
def test_every_namespace_field_separates_all_page_keys_c3(change: dict[str, object]) -> None:
    tokens = tokens_for(4, seed=3)
    plain = PrefixKey(namespace(), tokens)
    other = PrefixKey(namespace(**change), tokens)
    assert not set(_split(plain.page_keys())) & set(_split(other.page_keys()))
    assert plain.common_pages(other) == 0


def test_unit_kind_separates_all_page_keys_c3() -> None:
    tokens = tokens_for(4, seed=3, extra=1)
    token, pair = (PrefixKey(namespace(unit), tokens) for unit in UNITS)
    assert not set(_split(token.page_keys())) & set(_split(pair.page_keys()))


def test_namespace_fields_cannot_alias_by_concatenation_c3() -> None:
    shifted = [
        namespace(adapter="ab", salt="c"),
        namespace(adapter="a", salt="bc"),
        namespace(adapter="abc", salt=""),
        namespace(adapter="", salt="abc"),
    ]
    assert len({n.digest for n in shifted}) == len(shifted)


@pytest.mark.parametrize("unit", UNITS)
def test_chain_is_the_documented_one_c4(unit: UnitKind) -> None:
    tokens = tokens_for(3, seed=4, unit=unit)
    key, digest = PrefixKey(namespace(unit), tokens), namespace(unit).digest
    for page, found in enumerate(_split(key.page_keys())):
        raw = np.array(tokens[page * PAGE : (page + 1) * PAGE + unit.overlap], dtype="<i4")
        digest = hashlib.sha256(digest + raw.tobytes()).digest()
        assert found == digest


@pytest.mark.parametrize("unit", UNITS)
def test_extending_hashes_only_new_pages_c4(
    unit: UnitKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_for(8, seed=5, unit=unit)
    key = PrefixKey(namespace(unit), tokens[: 5 * PAGE + unit.overlap])
    key.page_keys()
    hashed: list[int] = []
    real = keys_module.chain_keys

    def counting(seed: bytes, data: bytes, page_bytes: int, page_width: int) -> bytes:
        keys = real(seed, data, page_bytes, page_width)
        hashed.append(len(keys) // 32)
        return keys

    monkeypatch.setattr(keys_module, "chain_keys", counting)
    longer = key.extend(tokens[5 * PAGE + unit.overlap :])
    assert longer.page_keys() == PrefixKey(namespace(unit), tokens).page_keys()
    assert hashed[0] == 3


def test_anchored_key_continues_the_chain_c4() -> None:
    tokens = tokens_for(6, seed=6)
    whole = PrefixKey(namespace(), tokens)
    anchored = PrefixKey(namespace(), tokens)
    anchored.anchor(4, whole.page_keys(3, 4))
    assert anchored.page_keys(4, 6) == whole.page_keys(4, 6)
    assert anchored.page_keys(0, 6) == whole.page_keys()


@pytest.mark.parametrize("tokens", [[-1], [2**31], [[1, 2], [3, 4]]])
def test_impossible_tokens_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ConfigError, match="token ids"):
        PrefixKey(namespace(), tokens)


def test_impossible_page_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_size"):
        dataclasses.replace(namespace(), page_size=0)


def _split(keys: bytes) -> list[bytes]:
    return [keys[i : i + 32] for i in range(0, len(keys), 32)]


@pytest.mark.parametrize("unit", list(UnitKind))
def test_equal_tokens_with_different_extra_material_share_no_page_c41(unit: UnitKind) -> None:
    tokens = tokens_for(6, seed=1, unit=unit)
    plain, cat, dog = (
        PrefixKey(namespace(unit), tokens, extra)
        for extra in (None, {2: b"image of a cat"}, {2: b"image of a dog"})
    )
    assert plain.num_pages == cat.num_pages == dog.num_pages == 6
    before = 2 - unit.overlap  # a pair page also names the first token of the next one
    for one, other in ((plain, cat), (plain, dog), (cat, dog)):
        assert one.common_pages(other) == before
        mine, theirs = split_keys(one.page_keys()), split_keys(other.page_keys())
        assert mine[:before] == theirs[:before]
        assert not set(mine[before:]) & set(theirs[before:])
    again = PrefixKey(namespace(unit), tokens, {2: b"image of a cat"})
    assert again == cat
    assert again.page_keys() == cat.page_keys()


def test_extra_material_is_never_what_tokens_could_be_c41() -> None:
    key = PrefixKey(namespace(), tokens_for(3, seed=1), {1: b"x"})
    assert (key[1:2].tokens < 0).all()
    assert (key[:1].tokens >= 0).all()
    with pytest.raises(ConfigError, match="token ids"):
        PrefixKey(namespace(), key.tokens.tolist())


def test_extra_material_of_pages_that_are_filled_later_c41() -> None:
    tokens = tokens_for(4, seed=1)
    whole = PrefixKey(namespace(), tokens, {1: b"a", 3: b"b"})
    grown = PrefixKey(namespace(), tokens[:10], {1: b"a"}).extend(tokens[10:], {3: b"b"})
    assert grown == whole
    assert grown.page_keys() == whole.page_keys()
    with pytest.raises(ConfigError, match="page 1"):
        grown.extend([1] * PAGE, {1: b"too late"})
    with pytest.raises(ConfigError, match="page 9"):
        PrefixKey(namespace(), tokens, {9: b"not there"})
