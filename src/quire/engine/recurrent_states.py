"""RecurrentStates: the cache of a transformers model's recurrent layers, over slots of a pool.

Speaks as transformers' Cache does, so far as models use it: a layer asks for its convolution's and
its recurrent state, changes them in place when it computes one token, and hands in new ones when
it computes more. Keys and values pass through untouched: attention has its own way to its pages.

One layer at a time, when it is first asked for:

    wait for its load ─▶ restore: snapshot → slot ─▶ computed ─▶ back to the slots ─▶ slot → save
                         or zeros at the start       └─ in the slot itself if they are neighbours
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.engine.attention.staging import Staging
from quire.engine.batch import Segment
from quire.errors import ModelError
from quire.memory.device import DevicePool
from quire.models import StateLayout, StatePart
from quire.types import NO_SLOT


@dataclass(frozen=True, slots=True)
class _Part:
    """What to do with the states of the sequences that are computed together."""

    slots: torch.Tensor
    """Where they are."""
    run: slice | None
    """The slots, if they are neighbours in this order."""
    restore: tuple[torch.Tensor, torch.Tensor] | None
    """From these snapshots to these slots."""
    fresh: torch.Tensor | None
    """Slots of sequences that begin."""
    save: tuple[torch.Tensor, torch.Tensor] | None
    """From these slots to these snapshots."""
    targets: torch.Tensor | None = None
    """Where they go, if some go nowhere (−1); else to `slots`."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The states of one layer, [sequences, …]; views of `rows`."""

    number: int
    index: int
    """In the pool."""
    rows: torch.Tensor
    """[sequences, words]: the slots themselves, or a copy."""
    conv: torch.Tensor
    recurrent: torch.Tensor | None


class RecurrentStates:
    def __init__(
        self,
        pool: DevicePool,
        layout: StateLayout,
        layers: Sequence[int],
        wait: Callable[[int], None],
    ) -> None:
        """`wait(i)`: until layer i of the pool is loaded."""
        self._pool = pool
        self._staging = Staging(pool.device)
        self._layout = layout
        self._index = {layer: i for i, layer in enumerate(layers)}
        self._wait = wait
        self._part: _Part | None = None
        self._layer: _Layer | None = None
        self._num_done = 0

    def begin(self, segments: Sequence[Segment]) -> None:
        """The next forward computes these, each one row of its batch."""
        self._part = self._plan(segments)
        self._layer = None
        self._num_done = 0

    def begin_at(self, slots: torch.Tensor) -> None:
        """As `begin`, of sequences that only go on; −1: there is none, and nothing is kept. The
        slots may change when the same work is done again."""
        self._part = _Part(slots.clamp(min=0), None, None, None, None, slots)
        self._layer = None
        self._num_done = 0

    def finish(self) -> None:
        """All layers are computed. Raises ModelError if some did not touch their state."""
        self._leave()
        self._part = None
        if self._num_done != len(self._index):
            raise ModelError(
                f"{self._num_done} of {len(self._index)} recurrent layers used their state: "
                "models of this kind cannot be served yet"
            )

    # ---- as transformers' Cache -----------------------------------------------------------------

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_where: object, **_options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._enter(layer_idx, state_idx).conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._enter(layer_idx, state_idx).recurrent

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> torch.Tensor:
        """`conv_states` [sequences, channels, tokens] → the same after what the state holds."""
        conv = self._enter(layer_idx, state_idx).conv
        kernel = conv.shape[-1]
        if conv_kernel_size not in (None, kernel):
            raise ModelError(f"a convolution's kernel is {conv_kernel_size}, not {kernel}")
        _check(conv_states[..., :1], conv[..., :1])
        full = torch.cat([conv, conv_states], dim=-1)
        conv.copy_(full[..., -kernel:])
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        recurrent = self._enter(layer_idx, state_idx).recurrent
        if recurrent is None:
            raise ModelError("a layer has a recurrent state that its configuration denies")
        _check(recurrent_states, recurrent)
        return recurrent.copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int = 0, state_idx: int = 0) -> bool:
        return True  # what begins goes on from zeros

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise AssertionError("positions are given, nobody has to ask")

    # ---- a layer --------------------------------------------------------------------------------

    def _enter(self, number: int, state_idx: int) -> _Layer:
        if self._layer is not None and self._layer.number == number:
            return self._layer
        if state_idx or number not in self._index:
            raise ModelError(f"layer {number} has a state that its configuration does not tell of")
        self._leave()
        part, index = self._part, self._index[number]
        assert part is not None, "a forward that did not begin"
        (words,) = self._pool.words(index)  # [slots, words]
        if part.restore is not None:
            self._wait(index)
            snapshots, slots = part.restore
            words.index_copy_(0, slots, words.index_select(0, snapshots))
        if part.fresh is not None:
            words.index_fill_(0, part.fresh, 0)
        rows = words[part.run] if part.run is not None else words.index_select(0, part.slots)
        recurrent = self._layout.recurrent
        self._layer = _Layer(
            number,
            index,
            rows,
            _view(rows, self._layout.conv),
            None if recurrent is None else _view(rows, recurrent),
        )
        return self._layer

    def _leave(self) -> None:
        layer, part = self._layer, self._part
        if layer is None or part is None:
            return
        (words,) = self._pool.words(layer.index)
        if part.targets is not None:
            from quire.engine.kernels.scatter import scatter

            scatter(layer.rows, part.targets, words)
        elif part.run is None:
            words.index_copy_(0, part.slots, layer.rows)
        if part.save is not None:
            slots, snapshots = part.save
            words.index_copy_(0, snapshots, words.index_select(0, slots))
        self._layer = None
        self._num_done += 1

    def _plan(self, segments: Sequence[Segment]) -> _Part:
        slots = [segment.state for segment in segments]
        if min(slots) < 0:
            raise ValueError("a segment has no slot for its state")
        first = slots[0]
        neighbours = slots == list(range(first, first + len(slots)))
        restored = [segment for segment in segments if segment.restore != NO_SLOT]
        fresh = [s.state for s in segments if s.restore == NO_SLOT and not s.start]
        saved = [segment for segment in segments if segment.save != NO_SLOT]
        return _Part(
            self._tensor(slots),
            slice(first, first + len(slots)) if neighbours else None,
            self._pairs([(s.restore, s.state) for s in restored]),
            self._tensor(fresh) if fresh else None,
            self._pairs([(s.state, s.save) for s in saved]),
        )

    def _pairs(self, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not pairs:
            return None
        sources, targets = zip(*pairs, strict=True)
        return self._tensor(sources), self._tensor(targets)

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        (found,) = self._staging.send([np.array(numbers, dtype=np.int64)])
        return found


def _view(rows: torch.Tensor, part: StatePart) -> torch.Tensor:
    """[sequences, words] → one part of each, [sequences, *shape]."""
    chosen = rows.view(torch.uint8)[:, part.offset : part.offset + part.size_bytes]
    dtype: torch.dtype = getattr(torch, part.dtype)
    return chosen.view(dtype).view(len(rows), *part.shape)


def _check(given: torch.Tensor, kept: torch.Tensor) -> None:
    if given.shape != kept.shape or given.dtype != kept.dtype:
        raise ModelError(
            f"a recurrent layer's state is {list(given.shape)} {given.dtype}, its configuration "
            f"says {list(kept.shape)} {kept.dtype}: models of this kind cannot be served yet"
        )
