"""Answers that follow a grammar: compiled beside the step (compiling.py), one request's place in it
(held.py); or that are given beforehand (told.py). The library that does it, llguidance, is imported
where a grammar is first asked for.
"""

from quire.engine.grammar.compiling import Compiled, CompileStage, Grammars, open_grammars
from quire.engine.grammar.held import Held
from quire.engine.grammar.told import Told

__all__ = ["CompileStage", "Compiled", "Grammars", "Held", "Told", "open_grammars"]
