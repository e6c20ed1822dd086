"""Namespace and PrefixKey: the one way to name a prefix, on every path.

Knows tokens, units, pages and digests. Does not know the tree, tiers or stores.

Units and pages, for page_size P. A token unit is one token; a pair unit is (tᵢ, tᵢ₊₁), so that n
tokens hold n−1 pair units and neighbouring pages share one token (the *overlap*, 0 or 1):

    tokens            t0 t1 t2 t3 t4 t5 t6 t7 t8         P = 4
    token pages      [t0 t1 t2 t3][t4 t5 t6 t7]  t8      page i holds tokens [iP, iP + P)
    pair pages       [t0 t1 t2 t3  t4]                   page i holds tokens [iP, iP + P + 1)
                                 [t4  t5 t6 t7 t8]

A page may carry extra material beside its tokens (the digest of an image, say, whose placeholder
tokens look like those of any other image). Its bytes are then a digest of both, in numbers that no
token has, so that everything that compares pages, in every tier, tells such pages apart (C41).

Page keys form a chain seeded by the namespace: key[i] = sha256(key[i−1] ‖ tokens of page i). They
are computed when asked for, kept, and shared by every slice and extension of the same key.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError
from quire.types import PAGE_KEY_BYTES

FORMAT_VERSION = 1
TOKEN_BYTES = 4
_MAX_TOKEN = 2**31 - 1
_TOKEN_TYPE = np.dtype("<i4")

Tokens = Sequence[int] | npt.NDArray[np.integer]


class UnitKind(enum.Enum):
    TOKEN = "token"
    PAIR = "pair"

    @property
    def overlap(self) -> int:
        """Tokens a page shares with the next one."""
        return 1 if self is UnitKind.PAIR else 0


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that decides whether two equal token prefixes have the same state.

    Two namespaces that differ in any field share no page in any tier.
    """

    model_fingerprint: str
    """Digest of the weights, not a name."""
    kv_dtype: str
    page_size: int
    unit: UnitKind = UnitKind.TOKEN
    adapter: str = ""
    salt: str = ""
    """Tenant salt: requests with different salts never share."""
    digest: bytes = field(init=False, repr=False, compare=False)
    """32 bytes; seed of the page-key chain."""
    page_bytes: int = field(init=False, repr=False, compare=False)
    """Of tokens: distance between the starts of two pages."""
    page_width: int = field(init=False, repr=False, compare=False)
    """Bytes of one page's tokens, overlap included."""

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError(f"page_size is {self.page_size}; it must be at least 1")
        fields = (
            str(FORMAT_VERSION),
            self.model_fingerprint,
            self.kv_dtype,
            str(self.page_size),
            self.unit.value,
            self.adapter,
            self.salt,
        )
        digest = hashlib.sha256(b"quire namespace")
        for text in fields:
            raw = text.encode()
            digest.update(len(raw).to_bytes(8, "little"))  # no two field lists concatenate alike
            digest.update(raw)
        page_bytes = self.page_size * TOKEN_BYTES
        object.__setattr__(self, "digest", digest.digest())
        object.__setattr__(self, "page_bytes", page_bytes)
        object.__setattr__(self, "page_width", page_bytes + self.unit.overlap * TOKEN_BYTES)


class TokenPath:
    """The bytes and the digest chain behind a PrefixKey and all its slices.

    `chain` holds the keys of pages [chain_first, chain_first + len(chain)/32); `seed` is the key
    of page chain_first − 1 (the namespace's digest for page 0).
    """

    __slots__ = ("chain", "chain_first", "data", "namespace", "page_bytes", "page_width", "seed")

    def __init__(self, namespace: Namespace, data: bytes) -> None:
        self.namespace = namespace
        self.data = data
        self.page_bytes = namespace.page_bytes
        self.page_width = namespace.page_width
        self.seed = namespace.digest
        self.chain_first = 0
        self.chain = bytearray()

    @property
    def num_pages(self) -> int:
        usable = len(self.data) - (self.page_width - self.page_bytes)
        return usable // self.page_bytes if usable > 0 else 0

    def keys(self, first: int, last: int) -> bytes:
        if first < self.chain_first:  # anchored past what is asked for: start again from the root
            self.seed, self.chain_first, self.chain = self.namespace.digest, 0, bytearray()
        chain, step, width = self.chain, self.page_bytes, self.page_width
        known = self.chain_first + len(chain) // PAGE_KEY_BYTES
        if known < last:
            seed = bytes(chain[-PAGE_KEY_BYTES:]) if chain else self.seed
            run = self.data[known * step : last * step + width - step]
            new = chain_keys(seed, run, step, width)
            chain += new
            if first == known:
                return new
        offset = self.chain_first
        return bytes(chain[(first - offset) * PAGE_KEY_BYTES : (last - offset) * PAGE_KEY_BYTES])


class PrefixKey:
    """Pages [first, last) of a token sequence in a namespace. Immutable, cheap to slice.

    A key made from tokens starts at page 0 and keeps the tokens beyond its last full page (they
    are part of `tokens`, never of a page). Slices address whole pages and hold no such tail.
    """

    __slots__ = ("first", "last", "path")

    def __init__(
        self, namespace: Namespace, tokens: Tokens, extra: Mapping[int, bytes] | None = None
    ) -> None:
        """`extra`: by page, what decides its state beside its tokens and those before it."""
        path = TokenPath(namespace, _token_bytes(tokens))
        if extra:
            path.data = _with_extra(path, extra, 0)
        self.path = path
        """What lies behind this key and all its slices; for the tree."""
        self.first = 0
        self.last = path.num_pages

    @property
    def namespace(self) -> Namespace:
        return self.path.namespace

    @property
    def num_pages(self) -> int:
        return self.last - self.first

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Tokens of the pages held, overlap included; empty for an empty key. A read-only view.
        Pages with extra material show negative numbers instead."""
        raw = self.page_tokens(self.first, self.last)
        return np.frombuffer(raw, dtype="<i4")

    @property
    def data(self) -> bytes:
        """Bytes of the whole path from page 0 on, whatever is sliced; for the tree."""
        return self.path.data

    @property
    def page_bytes(self) -> int:
        return self.path.page_bytes

    @property
    def page_width(self) -> int:
        return self.path.page_width

    def page_tokens(self, first: int, last: int) -> bytes:
        """Tokens of pages [first, last) of the path, overlap included; b"" when first == last."""
        if first >= last:
            return b""
        path = self.path
        end = (last - 1) * path.page_bytes + path.page_width
        return path.data[first * path.page_bytes : end]

    def __getitem__(self, pages: slice) -> PrefixKey:
        """Slice by pages relative to this key: key[:n] is its first n pages."""
        first, stop = self.first, pages.stop
        if (
            pages.start is pages.step is None
            and stop is not None
            and 0 <= stop <= self.last - first
        ):
            return _key_on(self.path, first, first + stop)  # as every commit asks
        start, stop, step = pages.indices(self.last - first)
        if step != 1:
            raise ValueError("a PrefixKey is sliced in steps of one page")
        return _key_on(self.path, first + start, first + max(start, stop))

    def page_keys(self, first: int | None = None, last: int | None = None) -> bytes:
        """Concatenated keys of pages [first, last) of the *path* (default: this key's pages)."""
        first = self.first if first is None else first
        last = self.last if last is None else last
        return self.path.keys(first, last) if first < last else b""

    def anchor(self, page: int, key: bytes) -> None:
        """Page `page` − 1 of this path is known to have `key`: hash on from there.

        Called with keys read off the tree, whose tokens were compared, so that a matched prefix
        is never hashed again.
        """
        path = self.path
        if page > path.chain_first + len(path.chain) // PAGE_KEY_BYTES:
            path.seed, path.chain_first, path.chain = key, page, bytearray()

    def extend(self, tokens: Tokens, extra: Mapping[int, bytes] | None = None) -> PrefixKey:
        """This key's full token sequence with `tokens` after it, and extra material for pages
        that were not full before; hashes only new pages."""
        old = self.path
        path = TokenPath(old.namespace, old.data + _token_bytes(tokens))
        if extra:
            path.data = _with_extra(path, extra, old.num_pages)
        path.seed, path.chain_first, path.chain = old.seed, old.chain_first, bytearray(old.chain)
        return _key_on(path, self.first, path.num_pages)

    def continues(self, other: PrefixKey, num_pages: int) -> bool:
        """Do the first `num_pages` pages of both paths hold the same?"""
        mine, theirs = self.path, other.path
        if mine is theirs:
            return True
        return mine.namespace.digest == theirs.namespace.digest and mine.data.startswith(
            other.page_tokens(0, num_pages)
        )

    def common_pages(self, other: PrefixKey) -> int:
        """Leading pages two keys share; 0 across namespaces or when they start elsewhere."""
        if self.namespace.digest != other.namespace.digest or self.first != other.first:
            return 0
        count = min(self.num_pages, other.num_pages)
        return common_pages(
            self.page_tokens(self.first, self.first + count),
            other.page_tokens(other.first, other.first + count),
            self.page_bytes,
            self.page_width,
        )

    def __len__(self) -> int:
        return self.num_pages

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrefixKey):
            return NotImplemented
        return (
            self.namespace.digest == other.namespace.digest
            and (self.first, self.last) == (other.first, other.last)
            and self.page_tokens(0, self.last) == other.page_tokens(0, other.last)
        )

    def __hash__(self) -> int:
        return hash((self.namespace.digest, self.first, self.page_tokens(0, self.last)))

    def __repr__(self) -> str:
        unit = self.namespace.unit.value
        return f"PrefixKey(pages {self.first}..{self.last} of {unit} units)"


def _key_on(path: TokenPath, first: int, last: int) -> PrefixKey:
    key = object.__new__(PrefixKey)
    key.path, key.first, key.last = path, first, last
    return key


def _with_extra(path: TokenPath, extra: Mapping[int, bytes], first: int) -> bytes:
    """The path's bytes, with each page that has extra material replaced by a digest of both: the
    first page that may have some is `first`."""
    data = bytearray(path.data)
    for page, material in extra.items():
        if not first <= page < path.num_pages:
            raise ConfigError(
                f"extra material for page {page}: only full pages from page {first} to "
                f"{path.num_pages - 1} can have some"
            )
        start, end = page * path.page_bytes, (page + 1) * path.page_bytes
        digest = hashlib.shake_256(len(material).to_bytes(8, "little") + material)
        digest.update(path.data[start:end])
        numbers = np.frombuffer(digest.digest(path.page_bytes), dtype="<u4") | np.uint32(1 << 31)
        data[start:end] = numbers.astype("<u4").tobytes()
    return bytes(data)


def chain_keys(seed: bytes, tokens: bytes, page_bytes: int, page_width: int) -> bytes:
    """The page-key chain: keys of the pages in `tokens`, which follow a page keyed `seed`."""
    key, sha256 = seed, hashlib.sha256
    if len(tokens) == page_width:  # a single one, as most questions to a store are about
        return sha256(seed + tokens).digest()
    keys: list[bytes] = []
    for start in range(0, len(tokens) - page_width + 1, page_bytes):
        key = sha256(key + tokens[start : start + page_width]).digest()
        keys.append(key)
    return b"".join(keys)


def common_pages(left: bytes, right: bytes, page_bytes: int, page_width: int) -> int:
    """Leading pages that two runs of page tokens share. Bisects: one memcmp per halving."""
    overlap = page_width - page_bytes
    low, high = 0, max(0, min(len(left), len(right)) - overlap) // page_bytes
    if left == right:
        return high
    while low < high:  # pages [0, low) are equal; a difference, if any, lies before page `high`
        middle = (low + high + 1) // 2
        start, end = low * page_bytes, middle * page_bytes + overlap
        if left.startswith(right[start:end], start):
            low = middle
        else:
            high = middle - 1
    return low


def _token_bytes(tokens: Tokens) -> bytes:
    if isinstance(tokens, np.ndarray) and tokens.dtype == _TOKEN_TYPE and tokens.ndim == 1:
        return tokens.tobytes()
    wide = np.asarray(tokens, dtype=np.int64)
    if wide.ndim != 1 or (wide.size and (wide.min() < 0 or wide.max() > _MAX_TOKEN)):
        raise ConfigError("token ids must be a flat sequence of integers from 0 to 2³¹ − 1")
    return wide.astype("<i4").tobytes()
