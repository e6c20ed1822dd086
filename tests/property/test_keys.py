"""PrefixKey against its definition: slicing, alignment, common prefix and page keys agree."""

from __future__ import annotations

import hashlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quire.keys import Namespace, PrefixKey, UnitKind
from quire.types import split_keys

units = st.sampled_from(UnitKind)
page_sizes = st.integers(1, 4)
tokens = st.lists(st.integers(0, 2), max_size=24)
names = st.text(alphabet="ab", max_size=3)


def make(page_size: int, unit: UnitKind) -> Namespace:
    return Namespace("model", "float32", page_size, unit)


def pages_of(values: list[int], page_size: int, unit: UnitKind) -> list[tuple[int, ...]]:
    """Definition: page i holds page_size units; a pair unit reaches one token further."""
    singles: list[tuple[int, ...]] = [(value,) for value in values]
    sequence = singles if unit is UnitKind.TOKEN else list(pairwise(values))
    pages = []
    for at in range(0, len(sequence) - page_size + 1, page_size):
        run = sequence[at : at + page_size]
        pages.append((*(unit[0] for unit in run), *run[-1][1:]))
    return pages


def chain(namespace: Namespace, pages: list[tuple[int, ...]]) -> list[bytes]:
    """Definition: key[i] = sha256(key[i−1] ‖ tokens of page i)."""
    key, keys = namespace.digest, []
    for page in pages:
        raw = b"".join(token.to_bytes(4, "little") for token in page)
        key = hashlib.sha256(key + raw).digest()
        keys.append(key)
    return keys


@given(tokens, page_sizes, units)
def test_a_key_holds_exactly_the_full_pages_c1(
    values: list[int], page_size: int, unit: UnitKind
) -> None:
    key = PrefixKey(make(page_size, unit), values)
    pages = pages_of(values, page_size, unit)
    assert key.num_pages == len(key) == len(pages)
    assert key.num_pages == len(pages)
    flat = [
        *(t for page in pages for t in page[:page_size]),
        *(pages[-1][page_size:] if pages else ()),
    ]
    assert key.tokens.tolist() == flat


@given(tokens, page_sizes, units)
def test_page_keys_equal_the_chain_from_scratch_c4(
    values: list[int], page_size: int, unit: UnitKind
) -> None:
    namespace = make(page_size, unit)
    expected = chain(namespace, pages_of(values, page_size, unit))
    assert split_keys(PrefixKey(namespace, values).page_keys()) == expected


@given(tokens, page_sizes, units, st.integers(0, 26), st.integers(0, 26))
def test_a_slice_has_the_tokens_and_keys_of_its_pages_c1(
    values: list[int], page_size: int, unit: UnitKind, start: int, stop: int
) -> None:
    namespace = make(page_size, unit)
    pages = pages_of(values, page_size, unit)[start:stop]
    part = PrefixKey(namespace, values)[start:stop]
    assert part.num_pages == len(pages)
    assert part.tokens.size == (len(pages) * page_size + unit.overlap if pages else 0)
    expected = chain(namespace, pages_of(values, page_size, unit))[start:stop]
    assert split_keys(part.page_keys()) == expected


@given(tokens, page_sizes, units, st.integers(0, 26), st.integers(0, 26))
def test_slicing_twice_is_slicing_once_c1(
    values: list[int], page_size: int, unit: UnitKind, cut: int, end: int
) -> None:
    key = PrefixKey(make(page_size, unit), values)
    assert key[:end][:cut] == key[: min(cut, end)]
    inner, outer = key[:end][cut:], key[cut:end]
    assert inner.tokens.tolist() == outer.tokens.tolist()
    assert inner.page_keys() == outer.page_keys()


@given(tokens, tokens, page_sizes, units)
def test_the_common_prefix_is_what_page_keys_have_in_common_c1(
    left: list[int], right: list[int], page_size: int, unit: UnitKind
) -> None:
    namespace = make(page_size, unit)
    one, two = PrefixKey(namespace, left), PrefixKey(namespace, right)
    shared = one.common_pages(two)
    assert shared == two.common_pages(one)
    pairs = zip(split_keys(one.page_keys()), split_keys(two.page_keys()), strict=False)
    by_digest = [a == b for a, b in pairs]
    assert by_digest[:shared] == [True] * shared
    assert not any(by_digest[shared:])
    assert one[:shared] == two[:shared]


@given(tokens, tokens, page_sizes, units)
def test_extending_is_the_same_as_starting_with_all_tokens_c4(
    head: list[int], more: list[int], page_size: int, unit: UnitKind
) -> None:
    namespace = make(page_size, unit)
    short, whole = PrefixKey(namespace, head), PrefixKey(namespace, head + more)
    short.page_keys()
    extended = short.extend(more)
    assert extended == whole
    assert hash(extended) == hash(whole)
    assert extended.page_keys() == whole.page_keys()


@given(tokens, page_sizes, units, st.data())
def test_an_anchored_key_goes_on_from_the_anchor_c4(
    values: list[int], page_size: int, unit: UnitKind, data: st.DataObject
) -> None:
    """Keys read off the tree continue the chain, and asking for earlier ones still works."""
    namespace = make(page_size, unit)
    expected = chain(namespace, pages_of(values, page_size, unit))
    at = data.draw(st.integers(0, len(expected)))
    first = data.draw(st.integers(0, len(expected)))
    key = PrefixKey(namespace, values)
    if at:
        key.anchor(at, expected[at - 1])
    assert split_keys(key.page_keys(at, len(expected))) == expected[at:]
    assert split_keys(key.page_keys(first, len(expected))) == expected[first:]


@given(st.tuples(names, names, names, names), st.tuples(names, names, names, names), units)
def test_no_two_namespaces_share_a_digest_c3(
    one: tuple[str, str, str, str], two: tuple[str, str, str, str], unit: UnitKind
) -> None:
    def build(fields: tuple[str, str, str, str]) -> Namespace:
        model, dtype, adapter, salt = fields
        return Namespace(model, dtype, 4, unit, adapter, salt)

    assert (build(one).digest == build(two).digest) == (one == two)


@given(tokens, page_sizes)
def test_token_and_pair_units_never_share_a_key_c3(values: list[int], page_size: int) -> None:
    token, pair = (PrefixKey(make(page_size, unit), values) for unit in UnitKind)
    assert set(split_keys(token.page_keys())).isdisjoint(split_keys(pair.page_keys()))
    assert token.common_pages(pair) == 0
