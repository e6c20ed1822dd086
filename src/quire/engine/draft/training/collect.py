"""From texts to examples: which passages and questions a head learns from, and is measured on.

    training    passages as they stand; sampled answers to questions of the files, to questions the
                model makes up, and to passages cut off, in a chat or going on where they stop
    held out    greedy answers to what was held out: a proposal is right if it is what stands there

Chance comes from a seed only.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quire.engine.draft.training.continuations import Speaker, TrainingPrompt
from quire.engine.draft.training.examples import Example
from quire.engine.draft.training.texts import Texts, TextSource
from quire.errors import ConfigError
from quire.progress import Progress

_PER_QUESTION = 4
"""Answers to one question of a file, at most."""
_TEMPERATURES = (0.0, 0.7, 1.0)
_LEAST_LEARNED = 3
"""A draft starts from two tokens: an answer must have more than that."""
_PROMPT_SHARE = (0.1, 0.4)
"""Of a passage: how much of it is the prompt to go on from."""


@dataclass(frozen=True, slots=True)
class Amounts:
    answers: int = 4096
    """To learn from."""
    invented: int = 2048
    """Of these to questions that the model makes up."""
    answer_tokens: int = 192
    """Of one answer, at most."""
    prompt_tokens: int = 1792
    """Of one prompt, at most."""
    held_out: int = 48
    """Answers to measure on, of each source."""


def collect_training(
    texts: Texts, speaker: Speaker, amounts: Amounts, seed: int, progress: Progress
) -> list[Example]:
    chance = random.Random(f"training {seed}")
    prompts = []
    if speaker.can_chat and amounts.invented:
        made_up = speaker.invented(amounts.invented, progress)
        prompts += _asked(made_up, speaker, amounts, 1)
    for source in texts.training:
        prompts += _asked(source, speaker, amounts, _PER_QUESTION)
    chance.shuffle(prompts)
    passages = [(source, p) for source in texts.training for p in source.passages]
    while passages and len(prompts) < amounts.answers:
        prompts.append(_cut(*chance.choice(passages), speaker, amounts, chance))
    prompts = prompts[: amounts.answers]
    chance.shuffle(prompts)
    examples: list[Example] = []
    for number, temperature in enumerate(_TEMPERATURES):
        part = prompts[number :: len(_TEMPERATURES)]
        what = f"answering at temperature {temperature}"
        examples += speaker.answers(part, amounts.answer_tokens, temperature, what, progress)
    chance.shuffle(passages)
    kept = passages[: max(1, amounts.answers // 2)]
    examples += [Example(torch.tensor(p, dtype=torch.int32), 2, s.name) for s, p in kept]
    return _long_enough(examples)


def collect_held_out(
    texts: Texts, speaker: Speaker, amounts: Amounts, seed: int, progress: Progress
) -> list[Example]:
    chance = random.Random(f"held out {seed}")
    prompts = []
    for source in texts.held_out:
        own = _asked(source, speaker, amounts, 1)
        chance.shuffle(own)
        while source.passages and len(own) < amounts.held_out:
            own.append(_cut(source, chance.choice(source.passages), speaker, amounts, chance))
        prompts += own[: amounts.held_out]
    answers = speaker.answers(prompts, amounts.answer_tokens, 0.0, "held-out answers", progress)
    examples = _long_enough(answers)
    if not examples:
        raise ConfigError(
            "nothing is held out to measure on: give longer texts, or a file with --held-out"
        )
    return examples


def _asked(
    source: TextSource, speaker: Speaker, amounts: Amounts, times: int
) -> list[TrainingPrompt]:
    prompts = [
        speaker.asked(question, amounts.prompt_tokens, source.name) for question in source.questions
    ]
    return prompts * times


def _cut(
    source: TextSource,
    passage: list[int],
    speaker: Speaker,
    amounts: Amounts,
    chance: random.Random,
) -> TrainingPrompt:
    size = max(1, round(len(passage) * chance.uniform(*_PROMPT_SHARE)))
    at = chance.randrange(max(1, len(passage) - size))
    tokens = passage[at : at + size]
    if speaker.can_chat and chance.random() < 0.5:
        return speaker.asked(speaker.text(tokens), amounts.prompt_tokens, source.name)
    return TrainingPrompt(tokens[-amounts.prompt_tokens :], source.name)


def _long_enough(examples: Iterable[Example]) -> list[Example]:
    return [e for e in examples if len(e.tokens) - e.start >= _LEAST_LEARNED and e.start > 0]
