"""Every prompt is answered in every way, one after the other, in turns: ratios are of one run.

Engines in this process, one for each way, all with the same model. What is measured is decoding:
from the first token of an answer to its last. Greedy, so answers must be the same, but for ties.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from quire.bench import Result, TokenArray
from quire.bench.gpu.driving import Drive
from quire.bench.gpu.random_model import RandomModel, write_outline
from quire.bench.speculate.imposed import Imposed, write_random_head
from quire.bench.speculate.prompt_lines import PromptSet, random_workload
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.engine.draft.kinds import DraftKind
from quire.engine.forward.dense import DenseModel
from quire.engine.messages import SamplingParams
from quire.progress import Progress

OFF = DraftKind.OFF.value


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatePlan:
    model: Path | None
    """None: a random one, of `shape`."""
    name: str
    ways: Sequence[str]
    """Beside `off`."""
    draft_tokens: int = 4
    num_tokens: int = 128
    """Of an answer."""
    rounds: int = 1
    at_once: int = 1
    """Requests computed together."""
    device: str = "cpu"
    dtype: str = "float32"
    device_bytes: int = 512 << 20
    threads: int = 0
    impose: float | None = None
    """Share of proposals that is let through, whatever the model says."""
    shape: str = ""


@dataclass(slots=True)
class WayMeasured:
    """One way on one workload."""

    seconds: list[float] = field(default_factory=list)
    """Of each group of requests, from the first token to the last."""
    num_tokens: int = 0
    answers: list[list[int]] = field(default_factory=list)
    num_drafts: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def run(
    plan: SpeculatePlan,
    workloads: Sequence[PromptSet],
    progress: Progress = lambda what, done, of: None,
) -> Result:
    """Raises ConfigError, ModelError, EngineError."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
        speaking = _speaking(plan, folder)
        if speaking.made is not None:
            vocabulary = speaking.made.spec.vocab_size
            workloads = [random_workload(vocabulary, count=4, max_tokens=512)]
        before = os.getloadavg()
        ways = [OFF, *plan.ways]
        drives = {}
        for number, way in enumerate(ways):
            progress("engines", number, len(ways))
            drives[way] = stack.enter_context(_drive(plan, speaking, way))
        rows = [_workload(plan, workload, drives, progress) for workload in workloads]
        same = all(way["same_answers"] for row in rows for way in row["ways"].values())
        return {
            "model": plan.name,
            "device": plan.device,
            "dtype": plan.dtype,
            "draft_tokens": plan.draft_tokens,
            "answer_tokens": plan.num_tokens,
            "at_once": plan.at_once,
            "imposed_acceptance": plan.impose,
            "threads": torch.get_num_threads(),
            "load": {"before": before, "after": os.getloadavg()},
            "workloads": rows,
            "ok": same or plan.impose is not None or plan.dtype != "float32",
        }


class _Speaking(NamedTuple):
    """What all ways speak with."""

    directory: Path
    head: str = ""
    """Which one `eagle` means."""
    made: DenseModel | None = None
    """If it is random: it is on no disk."""


def _speaking(plan: SpeculatePlan, folder: Path) -> _Speaking:
    if plan.model is not None:
        return _Speaking(plan.model)
    directory, head = folder / "model", folder / "head"
    spec = write_outline(directory, plan.shape)
    write_random_head(head, directory)
    made = RandomModel(spec, getattr(torch, plan.dtype), torch.device(plan.device)).make()
    return _Speaking(directory, f":{head}", made)


@contextlib.contextmanager
def _drive(plan: SpeculatePlan, speaking: _Speaking, way: str) -> Iterator[Drive]:
    head = speaking.head if way.startswith(DraftKind.EAGLE.value) else ""
    engine = build_engine(
        EngineConfig(
            model=str(speaking.directory),
            name=plan.name,
            device=plan.device,
            dtype=plan.dtype,
            device_bytes=plan.device_bytes,
            threads=plan.threads,
            speculate=way + head,
            draft_tokens=plan.draft_tokens,
            max_running=plan.at_once,
        ),
        between=partial(Imposed, rate=plan.impose) if plan.impose is not None else None,
        model=speaking.made,
    )
    try:
        yield Drive(engine)
    finally:
        engine.close()


def _workload(
    plan: SpeculatePlan, workload: PromptSet, drives: dict[str, Drive], progress: Progress
) -> Result:
    measured = {way: WayMeasured() for way in drives}
    prompts = workload.prompts
    groups = [prompts[at : at + plan.at_once] for at in range(0, len(prompts), plan.at_once)]
    for drive in drives.values():  # the first answer of a process pays for what is made once
        _answer(drive, prompts[:1], 16)
    for number in range(plan.rounds * len(groups)):
        progress(workload.name, number, plan.rounds * len(groups))
        order = list(drives)
        order = order[number % len(order) :] + order[: number % len(order)]
        for way in order:
            _measure(drives[way], groups[number % len(groups)], plan.num_tokens, measured[way])
    progress(workload.name, 1, 1)
    plain = measured[OFF]
    return {
        "name": workload.name,
        "prompts": len(prompts),
        "ways": {way: _row(found, plain) for way, found in measured.items()},
    }


def _measure(
    drive: Drive, prompts: Sequence[TokenArray], num_tokens: int, into: WayMeasured
) -> None:
    drafting = drive.engine.scheduler.drafting
    before = drive.engine.status().drafts
    seconds, answers = _answer(drive, prompts, num_tokens)
    into.seconds.append(seconds)
    into.answers += answers
    into.num_tokens += sum(len(answer) - 1 for answer in answers)
    after = drive.engine.status().drafts
    if drafting is None or before is None or after is None:
        return
    into.num_drafts += after.num_drafts - before.num_drafts
    zeros = [0] * drafting.speculation.max_tokens
    for name in ("proposed", "accepted"):
        grown = zip(getattr(after, name), getattr(before, name), strict=True)
        counted = zip(getattr(into, name) or zeros, (b - a for b, a in grown), strict=True)
        setattr(into, name, [total + new for total, new in counted])


def _answer(
    drive: Drive, prompts: Sequence[TokenArray], num_tokens: int
) -> tuple[float, list[list[int]]]:
    """Seconds from the first token to the last, and the answers."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    heard = drive.answer_all(prompts, params)
    first = max(one.times_s[0] for one in heard)
    last = max(one.times_s[-1] for one in heard)
    drive.settle()
    return max(last - first, time.get_clock_info("perf_counter").resolution), [
        one.tokens for one in heard
    ]


def _row(found: WayMeasured, plain: WayMeasured) -> Result:
    ratios = [own / other for own, other in zip(plain.seconds, found.seconds, strict=True)]
    speed = found.num_tokens / sum(found.seconds)
    num_steps = found.num_tokens - sum(found.accepted)
    return {
        "tokens_per_s": speed,
        "ratio": speed / (plain.num_tokens / sum(plain.seconds)),
        "ratio_of_pairs": statistics.median(ratios),
        "tokens_per_step": found.num_tokens / max(1, num_steps),
        "drafts": found.num_drafts,
        "proposed": found.proposed,
        "accepted": found.accepted,
        "same_answers": found.answers == plain.answers,
    }
