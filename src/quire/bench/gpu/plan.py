"""Plan: what `quire bench gpu` measures, and how much of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.gpu.random_model import SHAPES
from quire.errors import ConfigError

_ANSWER_TOKENS = 1024
"""Of each that decodes while a prompt is computed beside it, at most."""


class GpuPart(enum.StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"
    COPIES = "copies"
    HITS = "hits"
    CROSSOVER = "crossover"
    SETS = "sets"


def parse_shapes(text: str) -> list[str]:
    """As people write them, with commas. Raises ConfigError."""
    return _parse("--shape", text, list(SHAPES))


def parse_parts(text: str) -> frozenset[GpuPart]:
    """As people write them, with commas. Raises ConfigError."""
    return frozenset(GpuPart(name) for name in _parse("--only", text, list(GpuPart)))


def _parse(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or any(name not in known for name in names):
        raise ConfigError(f"{option} {text!r}: name some of {', '.join(known)}, with commas")
    return names


@dataclass(frozen=True, slots=True)
class SetPlan:
    """Sessions that come back, turn by turn, on a device that does not hold them all."""

    sessions: int = 16
    tokens: int = 6144
    """Of each session's first prompt."""
    turn_tokens: int = 64
    """That a user adds in each later round."""
    answer_tokens: int = 32
    rounds: int = 3
    at_once: int = 4
    times_device: float = 4.0
    """So many times what the device holds is the whole set."""
    fitting: int = 3
    """Of the sessions, in the set that fits."""

    @property
    def session_tokens(self) -> int:
        """In the last round."""
        later = (self.rounds - 1) * (self.turn_tokens + self.answer_tokens)
        return self.tokens + later + self.answer_tokens


@dataclass(frozen=True, slots=True)
class GpuPlan:
    shape: str = "qwen3-8b"
    device: str = "cuda"
    page_size: int = 64
    parts: frozenset[GpuPart] = frozenset(GpuPart)
    decode: tuple[tuple[int, int], ...] = (
        (1, 1024),
        (1, 8192),
        (64, 1024),
        (128, 1024),
    )
    """Requests at once, and the context of each."""
    decode_tokens: int = 64
    prompts: tuple[tuple[int, int], ...] = ((8192, 8192), (32768, 8192), (32768, 2048))
    """Tokens, and of each chunk."""
    mixed: tuple[int, int, int] = (64, 1024, 8192)
    """Requests that decode, the context of each, and the tokens of a prompt beside them; in chunks
    as of `prompts`."""
    hits: tuple[int, ...] = (1024, 8192, 32768, 130816)
    """Those that the model takes; what the host cannot hold is looked for on the device only."""
    more_tokens: int = 63
    """That a user adds to a prompt that was asked before: nearly a page is the worst."""
    disk_bytes: int = 512 << 20
    """Read and written to see what the store's disk does at best."""
    crossover_tokens: int = 8192
    crossover_ratios: tuple[float, ...] = (0.5, 1.0, 1.4, 2.0)
    """Of the time that the store takes for a page to that of computing it; a disk may be slower."""
    crossover_repeats: int = 2
    copy_pages: tuple[int, ...] = (16, 64)
    """Page sizes."""
    copy_bytes: int = 1 << 30
    beside: tuple[tuple[int, int], ...] = ((1, 1024), (64, 1024))
    """As `decode`, beside a saturated link."""
    fresh: tuple[int, int, int] = (64, 512, 128)
    """Requests at once, the tokens of each prompt and answer: nothing of them is reused."""
    fresh_rounds: int = 4
    sets: SetPlan = field(default_factory=SetPlan)
    device_bytes: int = 60 << 30
    host_bytes: int = 16 << 30
    budget_s: float | None = None
    """A part that would begin later is left out; None: none is."""
    seed: int = 0
    store: Path | None = None
    """Where the files of stores are put; None: where temporary files are."""

    @property
    def max_running(self) -> int:
        """Requests at once, in any part."""
        batches = [batch for batch, _ in (*self.decode, *self.beside)]
        return max(self.fresh[0], self.mixed[0] + 1, *batches)

    @property
    def chunked_tokens(self) -> int:
        """For which an engine needs room that computes prompts, alone and beside others."""
        batch, context, tokens = self.mixed
        beside = batch * (context + _ANSWER_TOKENS) + 4 * tokens
        return max(beside, 2 * max(tokens for tokens, _ in self.prompts)) + 2 * self.page_size

    @property
    def chunk_tokens(self) -> int:
        """Of the engine that all is measured on, unless it says otherwise."""
        return max(chunk for _, chunk in self.prompts)


SMALL: dict[str, Any] = {
    "decode": ((1, 64), (4, 64)),
    "decode_tokens": 8,
    "prompts": ((512, 512), (512, 128)),
    "mixed": (4, 64, 512),
    "hits": (128, 512),
    "disk_bytes": 2 << 20,
    "crossover_tokens": 512,
    "crossover_ratios": (1.0,),
    "crossover_repeats": 1,
    "copy_pages": (16,),
    "copy_bytes": 1 << 20,
    "beside": ((2, 64),),
    "fresh": (4, 64, 8),
    "fresh_rounds": 1,
    "sets": SetPlan(sessions=8, tokens=192, turn_tokens=16, rounds=2, answer_tokens=8, fitting=1),
}
"""Of a plan: to try it without an accelerator."""
