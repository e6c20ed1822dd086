"""Reading: how a model's answers are read. Which parser, from which tokens on, seeing which marks.

Knows the parsers of tools/ and a model's tokenizer; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.templates import ChatTemplate
from quire.server.tools import AUTO, NONE, Parser, Plain, Thinking, ToolFormat, Tools, choose
from quire.server.tools.reasoning import CLOSING, OPENING
from quire.server.vocabulary import Vocabulary

_AFTER_THOUGHT = f"\n{CLOSING}\n\n"


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
        knows_thought = CLOSING in template.source or CLOSING in vocabulary.added_texts
        self._thinks = knows_thought if reasoning_parser == AUTO else reasoning_parser != NONE
        self._vocabulary = vocabulary

    def is_thinking(self, rendered: str) -> bool:
        """Whether the template has opened the reasoning."""
        return self._thinks and rendered.rstrip().endswith(OPENING)

    def opening(self, function: str | None, *, is_thinking: bool) -> str:
        """What an answer begins with that must be a call. There must be a format."""
        assert self.format is not None
        return (_AFTER_THOUGHT if is_thinking else "") + self.format.opening(function)

    def parser(self, tools: Tools, *, is_thinking: bool) -> Parser:
        """Of an answer in which these may be called; none: it has no calls."""
        form = self._used(tools)
        parser = Plain() if form is None else form.parser(tools)
        return Thinking(parser, is_open=is_thinking) if self._thinks else parser

    def shown(self, tools: Tools) -> frozenset[int]:
        """Special tokens whose text that parser must see; others are dropped."""
        form = self._used(tools)
        markers = [*(form.markers if form else ()), *((OPENING, CLOSING) if self._thinks else ())]
        return self._vocabulary.ids_of(markers)

    def _used(self, tools: Tools) -> ToolFormat | None:
        return self.format if self.format and (tools or self.format.always) else None

    def new_id(self) -> str:
        """Of a call."""
        assert self.format is not None
        return self.format.new_id()


def fed(parser: Parser, text: str) -> Parser:
    """A parser that has read `text`, which says nothing yet."""
    events = parser.push(text)
    assert not events, f"an opening that is not held back: {events}"
    return parser


def ids_named(vocabulary: Vocabulary, stops: Sequence[str]) -> list[int]:
    """Special tokens that a client names as strings: their text never comes, so they stop."""
    special = set(vocabulary.special_texts)
    return sorted(vocabulary.ids_of([stop for stop in stops if stop in special]))
