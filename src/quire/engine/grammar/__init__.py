"""Answers that follow a grammar: compiled beside the step (compiling.py), one request's place in it
(held.py). The library that does it, llguidance, is imported where a grammar is first asked for.
"""

from quire.engine.grammar.compiling import Compiled, Grammars, Stage, open_grammars
from quire.engine.grammar.held import Held

__all__ = ["Compiled", "Grammars", "Held", "Stage", "open_grammars"]
