"""`quire store doctor`: will this store help on this machine? Measures, reckons, says it in words.

Fetching a prefix takes a question and then its bytes; computing it takes what `quire profile` has
measured (whoever calls has read it: here it is a `Machine`). Where the two lines cross is the
length from which the store helps.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from quire.bench.anystore import LIMITS, PROBE_KEYS, Measured, ProbeTimes, measured
from quire.progress import Progress
from quire.store.url import parse_url
from quire.types import PageKey

WRITE_S = 5.0
"""Writing for the measurement takes no longer, however slow the store is."""
LONGEST = 1 << 17
"""Tokens of the longest prompt that is thought of."""
EXAMPLES = (1024, 8192, 32768)
LLAMA_BYTES = 128 << 10
"""KV of one token of Llama 3.1 8B, in 16 bits: where nothing else is known."""


class FirstToken(Protocol):
    def __call__(self, num_tokens: int, from_store: int, bytes_per_s: float) -> float:
        """Seconds, when so many tokens of the prompt come from a store that gives so much."""


@dataclass(frozen=True)
class ProfiledMachine:
    """What computes here, and how fast."""

    name: str
    bytes_per_token: int
    longest_tokens: int
    """Of the prompts it was measured with: beyond, it is a guess."""
    ttft_s: FirstToken


@dataclass(frozen=True)
class Diagnosis:
    url: str
    page_bytes: int
    one_ms: float
    many_ms: float
    write_gb_s: float
    read_gb_s: float
    bytes_per_token: int
    crossover_tokens: int | None
    """From so many tokens on fetching is faster. None: not within LONGEST, or not known."""
    examples: list[dict[str, float]]
    """Seconds to fetch and to compute, by length; empty without a profile."""
    sentences: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(
    text: str,
    *,
    page_bytes: int,
    total_bytes: int,
    machine: ProfiledMachine | None,
    progress: Progress = lambda what, done, total: None,
) -> Diagnosis:
    """Raises StoreError."""
    with measured(text, page_bytes) as bench:
        probe, write_rate, read_rate = _figures(bench, total_bytes // page_bytes, progress)
    per_token = machine.bytes_per_token if machine is not None else LLAMA_BYTES
    found = Diagnosis(
        url=parse_url(text).shown,
        page_bytes=page_bytes,
        one_ms=probe.one_s * 1e3,
        many_ms=probe.many_s * 1e3,
        write_gb_s=write_rate / 1e9,
        read_gb_s=read_rate / 1e9,
        bytes_per_token=per_token,
        crossover_tokens=None,
        examples=[],
        sentences=[],
    )
    if machine is None:
        return _with(found, sentences=[*_speech(found), _unknown(read_rate, per_token)])
    way = Ways(machine, read_rate, probe.many_s)
    examples = [
        {"tokens": n, "fetch_s": way.fetch_s(n), "compute_s": way.compute_s(n)} for n in EXAMPLES
    ]
    found = _with(found, crossover_tokens=way.crossover(), examples=examples)
    return _with(found, sentences=[*_speech(found), *verdict(found, machine)])


def _with(found: Diagnosis, **changes: Any) -> Diagnosis:
    return Diagnosis(**{**found.__dict__, **changes})


def _figures(
    bench: Measured, most_pages: int, progress: Progress
) -> tuple[ProbeTimes, float, float]:
    """How long a question takes, and bytes a second in and out."""
    step = LIMITS.batch_pages * LIMITS.write_threads
    keys: list[PageKey] = []
    seconds, began_s = 0.0, time.monotonic()
    while len(keys) < most_pages and (not keys or time.monotonic() - began_s < WRITE_S):
        some = bench.keys(min(step, most_pages - len(keys)))
        seconds += bench.write(some)
        keys += some
        progress("writing", len(keys), most_pages)
    progress("writing", most_pages, most_pages)
    size = len(keys) * bench.page_bytes
    progress("reading", 0, 2)
    read_s = []
    for turn in (1, 2):
        read_s.append(bench.read(keys))
        progress("reading", turn, 2)
    return bench.probe(keys), size / seconds, size / min(read_s)


@dataclass(frozen=True)
class Ways:
    """Two ways to a prompt's first token."""

    machine: ProfiledMachine
    bytes_per_s: float
    asking_s: float

    def fetch_s(self, num_tokens: int) -> float:
        """All of it from the store, but for the token that must be computed."""
        return self.asking_s + self.machine.ttft_s(num_tokens, num_tokens - 1, self.bytes_per_s)

    def compute_s(self, num_tokens: int) -> float:
        return self.machine.ttft_s(num_tokens, 0, self.bytes_per_s)

    def crossover(self) -> int | None:
        """The shortest prompt that is sooner fetched than computed. Computing grows faster than
        fetching, so from there on it stays so."""

        def helps(num_tokens: int) -> bool:
            return self.fetch_s(num_tokens) < self.compute_s(num_tokens)

        if not helps(LONGEST):
            return None
        low, high = 1, LONGEST
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if helps(middle) else (middle + 1, high)
        return low


def _speech(found: Diagnosis) -> list[str]:
    return [
        f"A question about one page takes {found.one_ms:.1f} ms, about {PROBE_KEYS} pages "
        f"{found.many_ms:.1f} ms.",
        f"It gives {found.read_gb_s:.2f} GB/s and takes {found.write_gb_s:.2f} GB/s, checksums on.",
    ]


def _unknown(read_rate: float, per_token: int) -> str:
    return (
        f"That is {read_rate / per_token:,.0f} tokens a second of a model with "
        f"{per_token // 1024} KiB a token, such as Llama 3.1 8B. It helps if this machine computes "
        "fewer: run quire profile once, and ask again."
    )


def verdict(found: Diagnosis, machine: ProfiledMachine) -> list[str]:
    name = machine.name
    times = "; ".join(
        f"{each['tokens']:,.0f} tokens {each['fetch_s']:.2f} s instead of {each['compute_s']:.2f} s"
        for each in found.examples
    )
    if found.crossover_tokens is None:
        return [
            f"It does not help with {name}: computing is faster than fetching up to {LONGEST:,} "
            f"tokens ({times}). Take a faster store, or none.",
        ]
    guess = (
        f" Beyond {machine.longest_tokens:,} tokens, the longest prompt of the profile, that is a "
        "guess."
        if max(found.crossover_tokens, EXAMPLES[-1]) > machine.longest_tokens
        else ""
    )
    return [
        f"It helps with {name} from {found.crossover_tokens:,} tokens on: {times}.{guess}",
    ]
