"""Does a model go on from a saved state, or from the pages of a window, as if it had not stopped?

Asked of one rank when it is loaded, before its first request, for models that keep more than keys
and values of every token. It uses pages and slots that are all still free, and leaves zeros there.
With several ranks all of them are to be asked at once: they compute together.

    token       0 ············· cut ············ n
    straight    [ ······························)      pages a    state 0
    in parts    [ ·············)                       pages b    state 0 ──▶ snapshot 1
    going on                   [ ···············)      pages b    state 0
    resumed                    [ ···············)      pages b    state 2 ◀── snapshot 1

`going on` and `resumed` are one computation done twice, so they agree but for the order of sums.
Whether the model can stop at all is seen from `straight`, with room for rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.engine.batch import Batch, Segment
from quire.engine.layouts import FULL, RECURRENT, WINDOW
from quire.engine.messages import SamplingParams
from quire.engine.sampling import Row
from quire.errors import ModelError
from quire.types import NO_PAGES, NO_SLOT, RequestId, page_ids

if TYPE_CHECKING:
    from quire.engine.executor.rank import Rank

_TOKENS = 96
"""About so many are enough, and take no time."""
_OWN, _SNAPSHOT, _OTHER = 0, 1, 2
_MIN_SLOTS, _MIN_PAGES = 3, 4

_ROUNDING = {"float32": 0.01, "bfloat16": 0.25, "float16": 0.1}
"""How far apart logits may be, as a part of their size, by what the model is run in."""
_REPEATED = 0.1
"""Of that: how far the same computation done twice may be apart."""


def check_resume(rank: Rank) -> str:
    """Empty: it does; else why the model cannot be served, in a sentence."""
    if not (rank.shape.window_layers or rank.shape.recurrent_layers):
        return ""
    try:
        return _Check(rank).run()
    except (ModelError, RuntimeError, ValueError) as error:
        return f"{rank.shape.architecture} cannot be computed: {' '.join(str(error).split())[:300]}"
    finally:
        _clear(rank)


class _Check:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._page_size = rank.page_size
        pools = {name: pools.device for name, pools in rank.worker.components.items()}
        num_pages = min(pools[name].num_pages for name in (FULL, WINDOW) if name in pools)
        self._dtype = pools[FULL].layout.dtype
        self._has_states = RECURRENT in pools
        if num_pages < _MIN_PAGES:
            raise ValueError(f"{num_pages} pages are too few to check it")
        if self._has_states and pools[RECURRENT].num_pages < _MIN_SLOTS:
            raise ValueError(f"{pools[RECURRENT].num_pages} states are too few to check it")
        self._num_pages = min(num_pages // 2, max(2, _TOKENS // self._page_size))
        count = self._num_pages * self._page_size
        rng = np.random.default_rng(20)
        self._tokens = rng.integers(0, rank.shape.vocab_size, count).astype("<i4")

    def run(self) -> str:
        name = self._rank.shape.architecture
        end, cut = len(self._tokens), self._num_pages // 2 * self._page_size
        first, second = 0, self._num_pages  # the runs of pages that are used
        straight = self._logits(0, end, first)
        self._logits(0, cut, second, save=_SNAPSHOT)
        going_on = self._logits(cut, end, second)
        rounding = _ROUNDING[self._dtype]
        if _differ(straight, going_on, rounding):
            return f"{name} answers otherwise when its prompt is computed in parts"
        if self._has_states:
            resumed = self._logits(cut, end, second, state=_OTHER, restore=_SNAPSHOT)
            if _differ(going_on, resumed, rounding * _REPEATED):
                return f"{name} answers otherwise when it resumes from a saved state"
        return ""

    def _logits(
        self,
        start: int,
        end: int,
        first_page: int,
        *,
        state: int = _OWN,
        restore: int = NO_SLOT,
        save: int = NO_SLOT,
    ) -> torch.Tensor:
        """After token `end` - 1."""
        pages = range(first_page, first_page + -(-end // self._page_size))
        window = self._rank.shape.window
        skipped = max(0, start - window + 1) // self._page_size
        segment = Segment(
            RequestId("check"),
            self._tokens[start:end].tobytes(),
            start,
            page_ids(pages),
            [],
            Row(params=SamplingParams(max_tokens=1), position=0),
            window=page_ids(pages[skipped:]) if window else NO_PAGES,
            window_first=skipped if window else 0,
            state=state if self._has_states else NO_SLOT,
            restore=restore,
            save=save if self._has_states else NO_SLOT,
        )
        return self._rank.runner.logits(Batch(0, [segment]))[0]


def _differ(expected: torch.Tensor, found: torch.Tensor, rounding: float) -> bool:
    """Not finite, further apart than rounding explains, or with another best token."""
    dtype = torch.float64
    expected, found = (logits.to(dtype) - logits.to(dtype).mean() for logits in (expected, found))
    close = (expected - found).norm() <= rounding * expected.norm()  # False if one is not a number
    lost = expected.max() - expected[found.argmax()]
    return not bool(close) or bool(lost > rounding * expected.std())


def _clear(rank: Rank) -> None:
    for pools in rank.worker.components.values():
        for layer in range(pools.device.layout.num_layers):
            for words in pools.device.words(layer):
                words[: _used(rank)].zero_()


def _used(rank: Rank) -> int:
    return 2 * max(2, _TOKENS // rank.page_size)
