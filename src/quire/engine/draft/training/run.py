"""One training from files to a head: collect, learn, measure, write down. Goes on where it stopped.

OUT/config.json, model.safetensors     the head
OUT/report.json                        what it was made of, its losses, what is accepted
OUT/work/plan.json                     what was asked: a run that goes on must be the same
OUT/work/*.safetensors                 examples, the last checkpoint; of no use afterwards
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.engine.draft.eagle import EagleHead, usual_layers
from quire.engine.draft.headweights import WEIGHTS_NAME, assemble, save_head
from quire.engine.draft.training.acceptance import measure
from quire.engine.draft.training.collect import Amounts, collect_held_out, collect_training
from quire.engine.draft.training.continuations import Speaker
from quire.engine.draft.training.examples import (
    Example,
    in_batches,
    load_examples,
    save_examples,
)
from quire.engine.draft.training.start import (
    coverage,
    first_weights,
    likeliest_tokens,
    new_spec,
    positions_of,
    vocabulary_of,
)
from quire.engine.draft.training.target import TeacherModel
from quire.engine.draft.training.texts import read_texts
from quire.engine.draft.training.trainer import Course, Trainer
from quire.errors import ConfigError
from quire.models import load_tokenizer
from quire.progress import Progress

CHAIN = 5
"""Acceptance is measured for chains of 1 … so many tokens."""
_LOGS = 100
"""Entries in the history of a run, about."""
_LEAST_SHARE = 0.35
"""Of the time limit is for training, however long collecting took."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """All that decides what comes out."""

    model: Path
    texts: tuple[Path, ...]
    held_out: tuple[Path, ...]
    amounts: Amounts
    course: Course
    draft_vocab_size: int
    mlp_size: int | None
    """None: the model's own."""
    layers: tuple[int, int, int] | None
    """None: those that published heads look at."""
    own_lm_head: bool
    passage_tokens: int = 512


@dataclass(frozen=True, slots=True)
class TrainingPlace:
    """Where it runs; may be another when it goes on."""

    out: Path
    device: torch.device
    dtype: torch.dtype
    checkpoint_every: int


def run(
    plan: TrainingPlan,
    place: TrainingPlace,
    clock: Callable[[], float],
    progress: Progress,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The report. Raises ConfigError, ModelError."""
    work = place.out / "work"
    _begin(plan, work)
    begun = clock()
    teacher = TeacherModel(plan.model, dtype=place.dtype, device=place.device)
    spec = new_spec(
        teacher,
        plan.layers or usual_layers(teacher.shape.num_layers),
        plan.mlp_size or teacher.text.intermediate_size,
        plan.draft_vocab_size,
    )
    training, held_out = _examples(plan, teacher, work, progress, say)
    say(f"{len(training)} examples, {len(held_out)} held out, after {clock() - begun:.0f} s")

    tokens = likeliest_tokens(training, spec)
    first = first_weights(
        teacher, spec, tokens, own_lm_head=plan.own_lm_head, seed=plan.course.seed
    )
    course = _within_time(plan.course, clock() - begun)
    trainer = Trainer(
        teacher, spec, first, training, vocabulary=vocabulary_of(spec, tokens), course=course
    )
    _train(trainer, work / "checkpoint.safetensors", place, clock=clock, progress=progress, say=say)

    tensors = trainer.tensors(torch.bfloat16)
    save_head(place.out, spec, tensors, positions_of(teacher))
    # As it was saved, so that what is measured is what is used.
    head = EagleHead(spec, assemble(spec, tensors, teacher.embedding, teacher.lm_head))
    accepted = measure(head, teacher, in_batches(held_out, course.batch_tokens), CHAIN)
    report = {
        "plan": _as_json(plan),
        "examples": len(training),
        "learned_tokens": sum(len(e.tokens) - e.start for e in training),
        "coverage": round(coverage(held_out, tokens), 4),
        "layers": list(spec.layers),
        "head_bytes": (place.out / WEIGHTS_NAME).stat().st_size,
        "steps": trainer.step,
        "seconds": round(clock() - begun, 1),
        "device": str(place.device),
        "dtype": str(place.dtype).removeprefix("torch."),
        "history": trainer.history,
        "accepted": {source: result.as_dict() for source, result in accepted.items()},
    }
    (place.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _within_time(course: Course, spent_s: float) -> Course:
    """With what collecting has left of the time limit."""
    if course.time_limit_s is None:
        return course
    left_s = max(course.time_limit_s - spent_s, course.time_limit_s * _LEAST_SHARE)
    return dataclasses.replace(course, time_limit_s=left_s)


def _begin(plan: TrainingPlan, work: Path) -> None:
    """Raises ConfigError if something else was begun there."""
    wanted = _as_json(plan)
    file = work / "plan.json"
    try:
        work.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_text(json.dumps(wanted, indent=1) + "\n")
        begun = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(
            f"{work} cannot be written ({error.strerror}): give another --out"
        ) from error
    different = sorted(name for name in wanted if wanted[name] != begun.get(name))
    if different:
        raise ConfigError(
            f"{work} holds a training with other options ({', '.join(different)}): give the same "
            "to go on with it, or another --out"
        )


def _examples(
    plan: TrainingPlan,
    teacher: TeacherModel,
    work: Path,
    progress: Progress,
    say: Callable[[str], None],
) -> tuple[list[Example], list[Example]]:
    """To learn from, and to measure on; collected once."""
    files = [work / "training.safetensors", work / "held_out.safetensors"]
    if not all(file.exists() for file in files):
        seed = plan.course.seed
        tokenizer = load_tokenizer(plan.model)
        texts = read_texts(plan.texts, plan.held_out, tokenizer, plan.passage_tokens)
        speaker = Speaker(teacher, tokenizer, seed)
        say(f"texts read: {len(texts.training)} to learn from, {len(texts.held_out)} held out")
        save_examples(files[1], collect_held_out(texts, speaker, plan.amounts, seed, progress))
        say("held-out answers are there; the model answers what is to be learned from")
        save_examples(files[0], collect_training(texts, speaker, plan.amounts, seed, progress))
    return load_examples(files[0]), load_examples(files[1])


def _train(
    trainer: Trainer,
    checkpoint: Path,
    place: TrainingPlace,
    *,
    clock: Callable[[], float],
    progress: Progress,
    say: Callable[[str], None],
) -> None:
    course = trainer.course
    if checkpoint.exists():
        trainer.load(checkpoint)
        say(f"going on after step {trainer.step}")

    def on_log(entry: dict[str, Any]) -> None:
        say(
            f"step {entry['step']} of {course.steps}, {entry['seconds']:.0f} s: loss "
            f"{entry['loss'][0]:.3f} … {entry['loss'][-1]:.3f}, right {entry['right'][0]:.3f} … "
            f"{entry['right'][-1]:.3f}"
        )

    def on_step(step: int) -> None:
        progress("training", step, course.steps)
        if step % place.checkpoint_every == 0:
            trainer.save(checkpoint)

    trainer.train(clock, max(1, course.steps // _LOGS), on_log, on_step)
    trainer.save(checkpoint)


def _as_json(plan: TrainingPlan) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan), default=str))
    return fields
