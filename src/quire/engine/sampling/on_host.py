"""The way through numpy on the host: on the CPU, and what every other way is measured by.

The draw mostly ends among the first thousand tokens, so only those (the *head*) are sorted and
leave the device, with the sum over all; when they do not settle it, the whole row is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.engine.messages import TokenLogprobs
from quire.engine.sampling.base import (
    NOT_FINITE,
    Row,
    Sampled,
    is_greedy,
    needs_history,
    told,
    uniform,
)
from quire.types import RequestId

if TYPE_CHECKING:
    import torch

_HEAD_TOKENS = 1024
_CHUNK_ROWS = 64
"""Rows worked on together on an accelerator: bounds the memory that takes."""

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """One token per row of `logits` [rows, vocabulary], any device and float type; not changed.

    A row without a finite maximum (NaN, overflow, everything masked) gets an error of its own.
    """
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} rows"
    adjusted = _adjust(held_to(logits, rows), rows)
    peaks, tokens = _likeliest(adjusted)
    usable = [math.isfinite(peak) for peak in peaks]
    drawn = [i for i, row in enumerate(rows) if usable[i] and not is_greedy(row.params)]
    temperatures = [rows[i].params.temperature for i in drawn]
    heads = _heads(adjusted, drawn, temperatures, _HEAD_TOKENS) if drawn else []
    for i, head in zip(drawn, heads, strict=True):
        tokens[i] = _draw(head, rows[i], adjusted[i])
    logprobs = _logprobs(logits, tokens, rows, usable)
    return [
        Sampled(token, logprobs.get(i)) if usable[i] else Sampled(0, error=NOT_FINITE)
        for i, token in enumerate(tokens)
    ]


class HostDrawn:
    def __init__(self, sampled: list[Sampled], device: torch.device) -> None:
        self._sampled = sampled
        self._device = device

    @property
    def tokens(self) -> torch.Tensor:
        import torch

        return torch.tensor([s.token for s in self._sampled], dtype=torch.int64).to(self._device)

    def collect(self) -> list[Sampled]:
        return self._sampled


@dataclass(frozen=True, slots=True)
class _Last:
    """The last token drawn for a request that needs its history."""

    position: int
    token: int


class HostSampler:
    """Draws at once: it waits for the logits."""

    def __init__(self) -> None:
        self._last: dict[RequestId, _Last] = {}
        """Of the draw before, and no other."""

    def draw(
        self, logits: torch.Tensor, rows: Sequence[Row], ids: Sequence[RequestId]
    ) -> HostDrawn:
        whole = [self._completed(row, id) for row, id in zip(rows, ids, strict=True)]
        sampled = sample(logits, whole)
        self._last = {
            id: _Last(row.position, result.token)
            for row, id, result in zip(rows, ids, sampled, strict=True)
            if needs_history(row.params)
        }
        return HostDrawn(sampled, logits.device)

    def _completed(self, row: Row, id: RequestId) -> Row:
        if not (needs_history(row.params) and row.lacks_last):
            return row
        last = self._last[id]
        assert last.position == row.position - 1, f"{id}: the token before was not drawn here"
        output = row.output + np.int32(last.token).tobytes()
        return msgspec.structs.replace(row, output=output)


def _likeliest(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """Per row the maximum and the lowest id that has it, in one transfer."""
    import torch

    peaks, tokens = logits.max(dim=-1)  # of equals the first; NaN wins over all
    both = torch.stack([peaks.double(), tokens.double()]).tolist()
    return both[0], [int(token) for token in both[1]]


# ---- grammars, biases and penalties --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Edits:
    """Changes to single logits of one row, as columns: each token once."""

    tokens: Ids
    bias: Floats
    repetition: Floats
    subtract: Floats


def held_to(
    logits: torch.Tensor, rows: Sequence[Row], send: Callable[[Ids], torch.Tensor] | None = None
) -> torch.Tensor:
    """Without the tokens that a row may not draw, in a copy; the same tensor where all may be.
    `send`: how an array gets to the device of the logits."""
    import torch

    held = [i for i, row in enumerate(rows) if row.allowed]
    if not held:
        return logits
    size = logits.shape[1]
    # As wide as arrays travel: words of 8 bytes.
    num_bytes = -(-size // 64) * 8
    packed = bytearray().join(rows[i].allowed.ljust(num_bytes, b"\0") for i in held)
    wide = np.frombuffer(packed, np.uint8).reshape(len(held), num_bytes)
    send = send or (lambda array: torch.from_numpy(array).to(logits.device))
    if logits.device.type == "cpu":
        flags = np.unpackbits(wide, axis=1, bitorder="little").view(np.bool_)
        allowed = torch.from_numpy(flags)[:, :size]
    else:
        octets = send(wide.view(np.int64)).view(torch.uint8)
        bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = ((octets[:, :, None] & bits) != 0).view(len(held), -1)[:, :size]
    if len(held) == len(rows):
        return torch.where(allowed, logits, -math.inf)
    where = send(np.array(held, np.int64))
    masked = torch.where(allowed, logits.index_select(0, where), -math.inf)
    return logits.index_copy(0, where, masked)


def _adjust(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Biases and penalties applied, to a copy; the same tensor when there are none."""
    import torch

    edited = {
        i: _edits(row, logits.shape[1])
        for i, row in enumerate(rows)
        if row.params.logit_bias or needs_history(row.params)
    }
    if not edited:
        return logits
    edits = edited.values()
    row_ids = np.repeat(list(edited), [len(edit.tokens) for edit in edits])
    tokens = np.concatenate([edit.tokens for edit in edits])
    columns = np.hstack([np.stack([e.bias, e.repetition, e.subtract]) for e in edits])

    adjusted = logits.to(torch.float32, copy=True)
    where = tuple(torch.from_numpy(np.stack([row_ids, tokens])).to(logits.device))
    bias, repetition, subtract = torch.from_numpy(columns).float().to(logits.device)
    values = adjusted[where] + bias
    values = torch.where(values > 0, values / repetition, values * repetition) - subtract
    adjusted[where] = values
    return adjusted


def _edits(row: Row, vocab_size: int) -> _Edits:
    """Ids outside the vocabulary have no logit to change and are passed over."""
    params = row.params
    counts = _count(row.output, vocab_size)
    repeated = counts > 0
    if params.repetition_penalty != 1.0:
        repeated |= _count(row.prompt, vocab_size) > 0
    bias = np.zeros(vocab_size)
    for token, value in params.logit_bias.items():
        if 0 <= token < vocab_size:
            bias[token] = value
    tokens = np.flatnonzero(repeated | (bias != 0))
    counts = counts[tokens]
    return _Edits(
        tokens,
        bias[tokens],
        np.where(repeated[tokens], params.repetition_penalty, 1.0),
        params.presence_penalty * (counts > 0) + params.frequency_penalty * counts,
    )


def _count(tokens: bytes, vocab_size: int) -> Ids:
    """How often each id of the vocabulary occurs."""
    ids = np.frombuffer(tokens, dtype="<i4")
    return np.bincount(ids[(ids >= 0) & (ids < vocab_size)], minlength=vocab_size)


# ---- the distribution, from the likeliest token down ---------------------------------------------


@dataclass(frozen=True, slots=True)
class _Head:
    """The likeliest tokens of a row, by falling logit and, among equals, rising id."""

    ids: Ids
    logits: Floats
    temperature: float
    total: float
    """Sum of the weights of *all* tokens of the row."""
    complete: bool
    """These are all tokens of the row that weigh anything."""


def _heads(
    logits: torch.Tensor, rows: Sequence[int], temperatures: Sequence[float], size: int
) -> list[_Head]:
    """Of the rows named, which must have a finite maximum; never empty."""
    if logits.device.type == "cpu":
        return [_head_on_host(logits[i], t, size) for i, t in zip(rows, temperatures, strict=True)]
    heads: list[_Head] = []
    for first in range(0, len(rows), _CHUNK_ROWS):
        chunk = slice(first, first + _CHUNK_ROWS)
        heads += _heads_on_device(logits[list(rows[chunk])], temperatures[chunk], size)
    return heads


def _head_on_host(logits: torch.Tensor, temperature: float, size: int) -> _Head:
    """Row by row: what fits the processor's cache is many times faster than all rows at once."""
    values = logits.float().numpy()
    beyond = len(values) - size  # tokens left out
    if beyond <= 0:
        return _whole_row(logits, temperature)
    possible = np.flatnonzero(values > -np.inf)
    if len(possible) < size:  # a grammar leaves few, and the others weigh nothing
        ids = possible[np.argsort(-values[possible], kind="stable")]
        total = _weights(values[ids], values[ids[0]], temperature).sum()
        return _Head(ids, values[ids].astype(np.float64), temperature, float(total), complete=True)
    ids = np.flatnonzero(values > np.partition(values, beyond)[beyond])
    if not ids.size:
        return _whole_row(logits, temperature)
    ids = ids[np.argsort(-values[ids], kind="stable")]
    total = _weights(values, values[ids[0]], temperature).sum()
    return _Head(ids, values[ids].astype(np.float64), temperature, float(total), complete=False)


def _heads_on_device(logits: torch.Tensor, temperatures: Sequence[float], size: int) -> list[_Head]:
    """The same for all rows at once; only the heads are copied to the host."""
    import torch

    if logits.shape[1] <= size:
        return [_whole_row(row, t) for row, t in zip(logits, temperatures, strict=True)]
    top, ids = logits.topk(size, dim=-1)
    scale = torch.tensor(temperatures, dtype=torch.float64, device=logits.device)[:, None]
    totals = ((logits.double() - top[:, :1].double()) / scale).exp_().sum(dim=-1).tolist()
    top_values, top_ids = top.double().cpu().numpy(), ids.cpu().numpy()
    rest = (top_values[:, -1] == -np.inf).tolist()  # weighs nothing
    heads = []
    for i, temperature in enumerate(temperatures):
        # Which of the tokens that equal the last one were taken is up to the device: none is kept.
        inside = top_values[i] > top_values[i, -1]
        values, kept = top_values[i][inside], top_ids[i][inside]
        order = np.lexsort((kept, -values))
        heads.append(
            _Head(kept[order], values[order], temperature, totals[i], complete=rest[i])
            if len(order)
            else _whole_row(logits[i], temperature)
        )
    return heads


def _whole_row(logits: torch.Tensor, temperature: float) -> _Head:
    values = logits.float().cpu().numpy()
    ids = _by_falling_value(values)
    total = float(_weights(values, values[ids[0]], temperature).sum())
    return _Head(ids, values[ids].astype(np.float64), temperature, total, complete=True)


def _weights(values: npt.NDArray[Any], peak: float, temperature: float) -> Floats:
    """exp of the scaled logits, so that the likeliest has 1."""
    weights: Floats = np.exp((values.astype(np.float64) - float(peak)) / temperature)
    return weights


def _by_falling_value(values: npt.NDArray[np.float32]) -> Ids:
    """Ids by falling value and, among equals, rising id. Ten times as fast as a stable argsort.

    The bits of floats, read as integers, are in their order if those of negative ones are
    flipped; complemented they fall, and with the id below them no two are equal.
    """
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)  # −0 equals 0
    falling = ~np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys: Ids = np.sort((falling << 32) | np.arange(len(values)))
    return keys & 0xFFFFFFFF


def _draw(head: _Head, row: Row, logits: torch.Tensor) -> int:
    token = _try_draw(head, row)
    if token is None:
        token = _try_draw(_whole_row(logits, head.temperature), row)
    assert token is not None
    return token


def _try_draw(head: _Head, row: Row) -> int | None:
    """None if the head does not reach far enough to tell.

    Every filter keeps a prefix of the tokens in this order:

        0 ········ keep ········ len(head) ········ vocabulary
        [ drawn from )
    """
    params = row.params
    weights = _weights(head.logits, head.logits[0], head.temperature)
    cumulative: Floats = np.cumsum(weights)
    keep, mass, known = len(weights), head.total, head.complete
    if 0 < params.top_k <= len(weights):
        keep, mass, known = params.top_k, float(cumulative[params.top_k - 1]), True
    elif params.top_k > 0 and not head.complete:
        return None
    if params.top_p < 1.0:
        reached = int(np.searchsorted(cumulative[:keep], params.top_p * mass)) + 1
        if reached > keep and not known:
            return None
        keep, known = min(keep, reached), True
    if params.min_p > 0.0:
        likely = int(np.searchsorted(-weights[:keep], -params.min_p, side="right"))
        known = known or likely < keep
        if not known:
            return None
        keep = max(1, likely)
    if known:
        mass = float(cumulative[keep - 1])
    # At most (1 − 2⁻⁵³) · mass, which rounds to less than mass: a token of weight 0 is never drawn.
    point = uniform(params.seed, row.position) * mass
    index = int(np.searchsorted(cumulative[:keep], point, side="right"))
    return int(head.ids[index]) if index < keep else None


# ---- log probabilities ---------------------------------------------------------------------------


def _logprobs(
    logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[Row], usable: Sequence[bool]
) -> dict[int, TokenLogprobs]:
    """By row, for those that asked."""
    asked = [i for i, row in enumerate(rows) if usable[i] and row.params.logprobs is not None]
    if not asked:
        return {}
    counts = [rows[i].params.logprobs or 0 for i in asked]
    chosen = logits[asked, [tokens[i] for i in asked]].double().tolist()
    heads = _heads(logits, asked, [1.0] * len(asked), max(counts) + 1)
    found = {}
    for i, count, value, head in zip(asked, counts, chosen, heads, strict=True):
        if len(head.ids) < count and not head.complete:
            head = _whole_row(logits[i], 1.0)  # noqa: PLW2901
        base = float(head.logits[0]) + math.log(head.total)
        likeliest = zip(head.ids[:count].tolist(), head.logits[:count].tolist(), strict=True)
        found[i] = told(value, likeliest, base)
    return found
