"""The way through kernels on the device: nothing here waits for it.

    rows ─ one table of columns ─▶ edit (biases, penalties) ─▶ weigh ─▶ draw ─▶ likeliest (logprobs)
                                     ▲                                   │            │
           histories (see slots.py) ─┘◀─────── counts its token ─────────┤            │
                                                                         ▼            ▼
                                                          to pinned memory, and an event

What goes to the device, and comes from it, goes past the copy engines (see Staging). Knows requests
by their ids; not what becomes of their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.engine.attention.staging import Staging
from quire.engine.kernels.candidates import Searches
from quire.engine.kernels.histories import edit, note
from quire.engine.kernels.likeliest import likeliest
from quire.engine.kernels.masses import weigh
from quire.engine.kernels.rows import BLOCK, NUM_COLUMNS
from quire.engine.kernels.sampling import draw
from quire.engine.messages import SamplingParams, TokenLogprobs
from quire.engine.sampling.base import (
    NOT_FINITE,
    Row,
    Sampled,
    is_greedy,
    needs_history,
    told,
    uniform,
)
from quire.engine.sampling.on_host import held_to
from quire.engine.sampling.slots import Slot, Slots
from quire.types import RequestId


class DeviceDrawn:
    def __init__(
        self,
        staging: Staging,
        record: torch.Tensor,
        found: torch.Tensor | None,
        asked: dict[int, int],
    ) -> None:
        """`record`, `found`: as the kernels gave them; `asked`: rows → number of likeliest."""
        self._tokens = record[0]
        self._record = staging.receive(record)
        self._found = None if found is None else staging.receive(found)
        self._asked = asked

    @property
    def tokens(self) -> torch.Tensor:
        return self._tokens

    def collect(self) -> list[Sampled]:
        tokens, usable = self._record.wait().tolist()
        logprobs = self._logprobs()
        return [
            Sampled(token, logprobs.get(i)) if fine else Sampled(0, error=NOT_FINITE)
            for i, (token, fine) in enumerate(zip(tokens, usable, strict=True))
        ]

    def _logprobs(self) -> dict[int, TokenLogprobs]:
        if self._found is None:
            return {}
        logprobs = {}
        for (i, count), (chosen, peak, total, *top) in zip(
            self._asked.items(), self._found.wait().tolist(), strict=True
        ):
            base = peak + math.log(total) if total > 0 else math.nan  # NaN: the row is unusable
            likeliest = zip(top[: 2 * count : 2], top[1 : 2 * count : 2], strict=True)
            logprobs[i] = told(chosen, likeliest, base)
        return logprobs


@dataclass(frozen=True, slots=True)
class _Before:
    """The draw before: of whom, at which positions, and what."""

    places: dict[RequestId, int]
    positions: list[int]
    tokens: torch.Tensor


class DeviceSampler:
    def __init__(
        self, device: torch.device, vocab_size: int, max_rows: int, *, block: int = BLOCK
    ) -> None:
        """`block`: tokens that a program looks at together, for tests."""
        self._device = device
        self._vocab_size = vocab_size
        self._block = block
        self._slots = Slots(max_rows)
        self._seen = torch.zeros(max_rows, vocab_size, dtype=torch.int32, device=device)
        self._adjusted = torch.empty(max_rows, vocab_size, dtype=torch.float32, device=device)
        self._searches = Searches.room(max_rows, vocab_size, device, block)
        self._staging = Staging(device)
        self._biases = _Biases(device, max_rows, self._staging)
        self._before = _Before({}, [], torch.zeros(1, dtype=torch.int64, device=device))

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile every kernel for logits of this type. Takes seconds the first time ever."""
        logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
        id = RequestId("")
        for top_k in (0, 1):  # with and without counts
            params = SamplingParams(
                max_tokens=1, top_k=top_k, presence_penalty=1.0, logit_bias={0: 1.0}, logprobs=1
            )
            self.draw(logits, [Row(params, 0)], [id]).collect()
        self._slots.drop(id)

    def draw(
        self, logits: torch.Tensor, rows: Sequence[Row], ids: Sequence[RequestId]
    ) -> DeviceDrawn:
        assert logits.shape == (len(rows), self._vocab_size), f"{logits.shape} for {len(rows)} rows"
        assert len(rows) <= len(self._adjusted), f"{len(rows)} rows: more than there is room for"
        slots = self._take_slots(rows, ids)
        raw, logits = logits, held_to(logits, rows, self._send_one)
        if not slots and all(is_greedy(row.params) for row in rows):
            peaks, tokens = logits.max(dim=-1)  # of equals the first; NaN wins over all
            record = torch.stack([tokens, peaks.isfinite()])
        else:
            record = self._draw(logits, rows, slots)
        places = {id: place for place, id in enumerate(ids)}
        self._before = _Before(places, [row.position for row in rows], record[0])
        asked, found = self._find_logprobs(raw, record, rows)
        return DeviceDrawn(self._staging, record, found, asked)

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[Row], slots: dict[int, Slot]
    ) -> torch.Tensor:
        (columns,) = self._staging.send([_columns(rows, slots)])
        adjusted, block = self._adjusted, self._block
        if slots:
            biased = any(slot.num_biases for slot in slots.values())
            biases = self._biases.tensors if biased else None
            edit(logits, adjusted, self._seen, biases, columns, block=block)
        draws = not all(is_greedy(row.params) for row in rows)
        counts = any(row.params.top_k > 0 for row in rows)
        weighed = weigh(logits, adjusted, columns, draws=draws, counts=counts, block=block)
        return draw(
            logits,
            adjusted,
            self._seen,
            self._searches,
            columns,
            weighed,
            draws=draws,
            counts=counts,
            shares=any(row.params.top_p < 1 or row.params.min_p > 0 for row in rows),
            block=block,
        )

    def _send_one(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        (there,) = self._staging.send([array])
        return there

    def _take_slots(self, rows: Sequence[Row], ids: Sequence[RequestId]) -> dict[int, Slot]:
        """By row, for those with biases or penalties; histories and biases are sent if need be."""
        edited = [
            i for i, row in enumerate(rows) if row.params.logit_bias or needs_history(row.params)
        ]
        if not edited:
            return {}
        batch = {ids[i] for i in edited}
        slots = {i: self._slots.take(ids[i], batch) for i in edited}
        histories = {}
        for i, slot in slots.items():
            row = rows[i]
            if slot.position is None or slot.position != row.position - 1:
                slot.num_biases = self._biases.send(slot.number, row.params, self._vocab_size)
                if needs_history(row.params):
                    histories[i] = slot
            slot.position = row.position
        if histories:
            self._send_histories(rows, ids, histories)
        return slots

    def _send_histories(
        self, rows: Sequence[Row], ids: Sequence[RequestId], slots: dict[int, Slot]
    ) -> None:
        tokens, parts, start = [], [], 0
        for i, slot in slots.items():
            row = rows[i]
            prompt = row.prompt if row.params.repetition_penalty != 1.0 else b""
            middle = start + len(prompt) // 4
            end = middle + len(row.output) // 4
            follows = self._place_before(row, ids[i]) if row.lacks_last else -1
            parts.append((slot.number, start, middle, end, follows))
            tokens += [prompt, row.output]
            start = end
            self._seen[slot.number].zero_()
        flat = np.frombuffer(b"".join(tokens) or bytes(4), dtype="<i4").copy()
        table = np.array(parts, dtype=np.int64).T.copy()
        longest = int((table[3] - table[1]).max())
        tokens_there, table_there = self._staging.send([flat, table])
        note(self._seen, tokens_there, table_there, longest, self._before.tokens)

    def _place_before(self, row: Row, id: RequestId) -> int:
        """Where its last token is in the draw before."""
        place = self._before.places[id]
        assert self._before.positions[place] == row.position - 1, f"{id}: a token is missing"
        return place

    def _find_logprobs(
        self, logits: torch.Tensor, record: torch.Tensor, rows: Sequence[Row]
    ) -> tuple[dict[int, int], torch.Tensor | None]:
        asked = {
            i: min(row.params.logprobs, self._vocab_size)
            for i, row in enumerate(rows)
            if row.params.logprobs is not None
        }
        if not asked:
            return {}, None
        (table,) = self._staging.send([np.array([list(asked), list(asked.values())])])
        return asked, likeliest(logits, record, table, max(asked.values()))


class _Biases:
    """By slot, tokens and values as columns; room grows with the longest there has been."""

    def __init__(self, device: torch.device, capacity: int, staging: Staging) -> None:
        self._staging = staging
        self._tokens = torch.empty(capacity, 64, dtype=torch.int32, device=device)
        self._values = torch.empty(capacity, 64, dtype=torch.float32, device=device)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tokens, self._values

    def send(self, slot: int, params: SamplingParams, vocab_size: int) -> int:
        """Number of those that there is a logit for."""
        biases = {t: value for t, value in params.logit_bias.items() if 0 <= t < vocab_size}
        number = len(biases)
        if not number:
            return 0
        while self._tokens.shape[1] < number:
            self._tokens = torch.cat([self._tokens, torch.empty_like(self._tokens)], dim=1)
            self._values = torch.cat([self._values, torch.empty_like(self._values)], dim=1)
        columns = (
            np.fromiter(biases, dtype=np.int32),
            np.fromiter(biases.values(), dtype=np.float32),
        )
        tokens, values = self._staging.send(columns)
        self._tokens[slot, :number] = tokens
        self._values[slot, :number] = values
        return number


def _columns(rows: Sequence[Row], slots: dict[int, Slot]) -> npt.NDArray[np.float64]:
    """The table that kernels/rows.py describes."""
    table = np.empty((len(rows), NUM_COLUMNS))
    for i, row in enumerate(rows):
        p = row.params
        greedy = is_greedy(p)
        slot = slots.get(i)
        table[i] = (
            0.0 if greedy else p.temperature,
            p.top_k,
            p.top_p,
            p.min_p,
            0.0 if greedy else uniform(p.seed, row.position),
            -1 if slot is None else slot.number,
            p.repetition_penalty,
            p.presence_penalty,
            p.frequency_penalty,
            0 if slot is None else slot.num_biases,
        )
    return np.ascontiguousarray(table.T)
