"""Reading: how a model's answers are read. Which parser, from which tokens on, seeing which marks.

Knows the parsers of tools/ and a model's tokenizer; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.templates import ChatTemplate
from quire.text.tools import AUTO, NONE, Parser, Plain, Thinking, ToolFormat, Tools, choose
from quire.text.tools.reasoning import KNOWN, THINK, Bounds
from quire.text.tools.toolless import RESULT_MARKS
from quire.text.vocabulary import Vocabulary


class Reading:
    def __init__(
        self,
        template: ChatTemplate,
        vocabulary: Vocabulary,
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        """Raises ConfigError."""
        self.format: ToolFormat | None = None
        if tool_parser != NONE:
            special = vocabulary.special_texts
            native = template.knows_tools
            self.format = choose(tool_parser, template.source, special, native=native)
        self.bounds = _bounds_of(reasoning_parser, template, vocabulary)
        """Of reasoning, where it is told apart."""
        self._vocabulary = vocabulary

    @property
    def marks(self) -> str:
        """All that has a meaning in an answer or in a prompt, in one text."""
        markers = self.format.markers if self.format else ()
        thought = [token for each in KNOWN for token in each.tokens]
        return " ".join((*markers, *thought, *RESULT_MARKS))

    @property
    def mark_ids(self) -> dict[str, int]:
        """Of the marks in an answer, those that are tokens of the model."""
        markers = self.format.markers if self.format else ()
        ids = {mark: self._vocabulary.id_of(mark) for mark in (*markers, *self._thought_tokens)}
        return {mark: token for mark, token in ids.items() if token is not None}

    @property
    def thought_marks(self) -> list[str]:
        """Those of them that stand around reasoning."""
        return [mark for mark in self.mark_ids if mark in self._thought_tokens]

    @property
    def _thought_tokens(self) -> tuple[str, ...]:
        return self.bounds.tokens if self.bounds else ()

    def is_thinking(self, rendered: str) -> bool:
        """Whether the template has opened the reasoning."""
        return self.bounds is not None and rendered.rstrip().endswith(self.bounds.opening)

    def opening(self, function: str | None, *, is_thinking: bool) -> str:
        """What an answer begins with that must be a call. There must be a format."""
        assert self.format is not None
        opening = self.format.opening(function)
        if is_thinking and self.bounds is not None:
            return f"\n{self.bounds.closing}\n\n{opening}"
        return opening

    def parser(self, tools: Tools, *, is_thinking: bool) -> Parser:
        """Of an answer in which these may be called; none: it has no calls."""
        form = self._used(tools)
        parser = Plain() if form is None else form.parser(tools)
        if self.bounds is None:
            return parser
        return Thinking(parser, is_open=is_thinking, bounds=self.bounds)

    def shown(self, tools: Tools) -> frozenset[int]:
        """Special tokens whose text that parser must see; others are dropped."""
        form = self._used(tools)
        markers = form.markers if form else ()
        return self._vocabulary.ids_of([*markers, *self._thought_tokens])

    def _used(self, tools: Tools) -> ToolFormat | None:
        return self.format if self.format and (tools or self.format.always) else None

    def new_id(self) -> str:
        """Of a call."""
        assert self.format is not None
        return self.format.new_id()


def _bounds_of(option: str, template: ChatTemplate, vocabulary: Vocabulary) -> Bounds | None:
    """What stands around a model's reasoning; None: nothing, or it is not to be told apart."""
    if option == NONE:
        return None
    added = vocabulary.added_texts
    for bounds in KNOWN:
        if bounds.closing in template.source or bounds.closing in added:
            return bounds
    return None if option == AUTO else THINK


def fed(parser: Parser, text: str) -> Parser:
    """A parser that has read `text`, which says nothing yet."""
    events = parser.push(text)
    assert not events, f"an opening that is not held back: {events}"
    return parser


def ids_named(vocabulary: Vocabulary, stops: Sequence[str]) -> list[int]:
    """Special tokens that a client names as strings: their text never comes, so they stop."""
    special = set(vocabulary.special_texts)
    return sorted(vocabulary.ids_of([stop for stop in stops if stop in special]))
