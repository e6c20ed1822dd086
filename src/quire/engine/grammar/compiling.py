"""Grammars: compiled in threads of their own, and kept, so that no step waits for one.

    asked ──▶ PENDING ──compiled, first mask computed──▶ READY ──begin()──▶ Held, per request
                 └──not a grammar, too large, too complex──▶ FAILED

The library's own limits bound how long compiling takes and how much a step may be held up by one
mask; what exceeds them is an error of that grammar. The model's vocabulary is read with the first
grammar there is. Knows no requests.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from quire.engine.grammar.held import Held, explained

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 1 << 20
_THREADS = 2
_MOST_KEPT = 64
_MOST_KEPT_CHARS = 4 << 20


class GrammarError(Exception):
    """This grammar cannot be held to, and why. Told by Compiled, never raised to others."""


class CompileStage(enum.Enum):
    PENDING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class Words:
    """A model's vocabulary, as grammars see it."""

    tokenizer: LLTokenizer
    size: int
    ends: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Prototype:
    matcher: LLMatcher
    words: Words


class Compiled:
    """A grammar that was asked for."""

    def __init__(self, future: Future[_Prototype]) -> None:
        self._future = future

    @property
    def stage(self) -> CompileStage:
        if not self._future.done():
            return CompileStage.PENDING
        return CompileStage.READY if self._future.exception() is None else CompileStage.FAILED

    @property
    def error(self) -> str:
        """Why it failed."""
        return str(self._future.exception())

    def begin(self, stop_ids: Collection[int]) -> Held:
        """From its beginning, for one request. It must be READY."""
        made = self._future.result(timeout=0)
        return Held(
            made.matcher.deep_copy(),
            vocab_size=made.words.size,
            ends=made.words.ends,
            stop_ids=stop_ids,
        )


class Grammars:
    def __init__(self, read_words: Callable[[], Words]) -> None:
        """`read_words`: called once, in a thread. May raise GrammarError."""
        self._read_words = read_words
        self._words: Words | None = None
        self._reading = Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "quire-grammar")
        self._kept: OrderedDict[str, Compiled] = OrderedDict()  # used longest ago first

    def ask(self, text: str) -> Compiled:
        """Never waits."""
        compiled = self._kept.pop(text, None)
        if compiled is None:
            compiled = Compiled(self._threads.submit(self._compile, text))
        self._kept[text] = compiled
        while len(self._kept) > _MOST_KEPT or (
            len(self._kept) > 1 and sum(map(len, self._kept)) > _MOST_KEPT_CHARS
        ):
            self._kept.popitem(last=False)
        return compiled

    def _compile(self, text: str) -> _Prototype:
        """Raises GrammarError. In a thread; the library lets go of the interpreter."""
        if len(text) > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"it has {len(text)} characters: {MAX_GRAMMAR_CHARS} are possible")
        with self._reading:
            words = self._words = self._words or self._read_words()
        import llguidance

        matcher = llguidance.LLMatcher(
            words.tokenizer,
            llguidance.LLMatcher.grammar_from_lark(text),
            log_level=0,
            limits=llguidance.LLParserLimits(
                initial_lexer_fuel=1_000_000,  # 20 ms
                step_lexer_fuel=100_000,  # 7 ms
                step_max_items=20_000,  # 1 ms
                max_lexer_states=50_000,  # 100 MB
                max_grammar_size=200_000,
                verbose_errors=False,
            ),
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes longest, and is not to do so in a step
        if matcher.is_error():
            raise GrammarError(explained(matcher.get_error()))
        return _Prototype(matcher, words)


def open_grammars(model: Path, vocab_size: int) -> Grammars:
    """Of a model's directory; nothing is read before there is a grammar."""
    return Grammars(lambda: _read_words(model, vocab_size))


def _read_words(model: Path, vocab_size: int) -> Words:
    try:
        import llguidance
    except ImportError:
        raise GrammarError("this server has no llguidance: pip install llguidance") from None
    try:
        file = model / "tokenizer.json"
        text = file.read_text() if file.exists() else _converted(model)
        tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size)
    except Exception as error:  # a boundary: a user's files, and somebody else's parser of them
        reason = explained(str(error))
        raise GrammarError(f"the model's tokenizer cannot be used for grammars: {reason}") from None
    return Words(tokenizer, vocab_size, tokenizer.eos_tokens)


def _converted(model: Path) -> str:
    from quire.models import load_tokenizer

    backend = load_tokenizer(model).backend_tokenizer
    text: str = backend.to_str()
    return text
