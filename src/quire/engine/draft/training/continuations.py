"""What the model itself says: to questions, to passages cut off, and to questions it makes up.

A head drafts what its target would say, so it learns from that more than from any text. Knows chat
templates and transformers' generation; where questions come from is texts.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.engine.draft.training.examples import Example
from quire.engine.draft.training.target import TeacherModel
from quire.engine.draft.training.texts import TextSource
from quire.progress import Progress

INVENTED = "invented"
_MARK = "\x00"
_QUESTION_TOKENS = 48
_LEAST_CHARS = 12
"""A question shorter than this is none."""
_MAX_ROWS = {"cpu": 16, "cuda": 2048}
_HOST_BYTES = 4 << 30
"""Taken as free on the host."""
_DEVICE_SHARE = 4
"""Keys and values of one batch of answers may take one in so many of the bytes that are free."""
_PROMPT_TOKENS = {"cpu": 1 << 14, "cuda": 1 << 19}
"""Read at once, of all prompts of a batch."""


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    tokens: list[int]
    source: str


class Speaker:
    """A model with its tokenizer, that answers."""

    def __init__(self, teacher: TeacherModel, tokenizer: Any, seed: int) -> None:
        self._teacher = teacher
        self._tokenizer = tokenizer
        self._seed = seed
        self._num_batches = 0
        generation = teacher.model.generation_config
        ends = generation.eos_token_id
        self._ends: list[int] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        self._template_tokens = len(self._tokens(self._chat(""))) if self.can_chat else 0
        shape = teacher.shape
        self._token_bytes = (
            2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * teacher.dtype.itemsize
        )

    @property
    def can_chat(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def asked(self, question: str, max_tokens: int, source: str) -> TrainingPrompt:
        """A question as a chat has it, or as it stands where there is no chat template. Of one that
        is too long, the end."""
        tokens = self._tokens(question)
        if not self.can_chat:
            return TrainingPrompt(tokens[-max_tokens:], source)
        room = max(1, max_tokens - self._template_tokens)
        if len(tokens) > room:
            question = self.text(tokens[-room:])
        return TrainingPrompt(self._tokens(self._chat(question)), source)

    def text(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text

    def invented(self, count: int, progress: Progress) -> TextSource:
        """Questions of the model's own: what it says in the place of the one who asks."""
        opening = self._tokens(self._chat(_MARK).partition(_MARK)[0])
        prompts = [TrainingPrompt(opening, INVENTED)] * count
        answers = self.answers(prompts, _QUESTION_TOKENS, 1.0, "inventing questions", progress)
        texts = (
            self._tokenizer.decode(answer.tokens[answer.start :], skip_special_tokens=True).strip()
            for answer in answers
        )
        return TextSource(INVENTED, questions=[text for text in texts if len(text) >= _LEAST_CHARS])

    def answers(
        self,
        prompts: Sequence[TrainingPrompt],
        num_tokens: int,
        temperature: float,
        what: str,
        progress: Progress,
    ) -> Iterator[Example]:
        """Of up to `num_tokens`; the likeliest one where `temperature` is 0."""
        done = 0
        for group in self._groups(prompts, num_tokens):
            yield from self._answered(group, num_tokens, temperature)
            done += len(group)
            progress(what, done, len(prompts))

    def _groups(
        self, prompts: Sequence[TrainingPrompt], num_tokens: int
    ) -> Iterator[list[TrainingPrompt]]:
        """Of similar length: they are padded to the longest."""
        left = sorted(prompts, key=lambda prompt: len(prompt.tokens), reverse=True)
        kind = self._teacher.device.type
        memory_bytes = _free_bytes(self._teacher.device) // _DEVICE_SHARE
        while left:
            length = len(left[0].tokens)
            row_bytes = self._token_bytes * (length + num_tokens)
            rooms = (
                _MAX_ROWS[kind],
                memory_bytes // row_bytes,
                _PROMPT_TOKENS[kind] // length,
            )
            size = max(1, min(rooms))
            yield left[:size]
            left = left[size:]

    @torch.no_grad()
    def _answered(
        self, prompts: Sequence[TrainingPrompt], num_tokens: int, temperature: float
    ) -> Iterator[Example]:
        length = max(len(prompt.tokens) for prompt in prompts)
        pad = self._ends[0] if self._ends else 0
        rows = [[pad] * (length - len(prompt.tokens)) + prompt.tokens for prompt in prompts]
        mask = [
            [0] * (length - len(prompt.tokens)) + [1] * len(prompt.tokens) for prompt in prompts
        ]
        torch.manual_seed(self._seed * 1_000_003 + self._num_batches)
        self._num_batches += 1
        chance: dict[str, Any] = {"do_sample": False}
        if temperature:
            chance = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        said = self._teacher.model.generate(
            input_ids=torch.tensor(rows, device=self._teacher.device),
            attention_mask=torch.tensor(mask, device=self._teacher.device),
            max_new_tokens=num_tokens,
            pad_token_id=pad,
            **chance,
        )[:, length:].tolist()
        for prompt, answer in zip(prompts, said, strict=True):
            own = self._until_end(answer)
            tokens = torch.tensor(prompt.tokens + own, dtype=torch.int32)
            yield Example(tokens, len(prompt.tokens), prompt.source)

    def _until_end(self, tokens: list[int]) -> list[int]:
        """With the token that ends it."""
        for place, token in enumerate(tokens):
            if token in self._ends:
                return tokens[: place + 1]
        return tokens

    def _chat(self, question: str) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return text

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens


def _free_bytes(device: torch.device) -> int:
    """With those that torch keeps for later."""
    if device.type != "cuda":
        return _HOST_BYTES
    free_bytes, _ = torch.cuda.mem_get_info(device)
    kept_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_bytes + kept_bytes
