"""Text for prompts: seeded sentences of plain words.

Knows characters, not tokens. No two passages of one Prose begin alike, so that none is a prefix
of another by accident.
"""

from __future__ import annotations

import random

_WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had
an they which one you were her all she there would their we him been has when who will more no if
out so said what up its about into than them can only other new some could time these two may then
do first any my now such like our over man me even most made after also did many before must through
back years where much your way well down should because each just those people how too little state
good very make world still own see men work long get here between both life being under never day
same another know while last might us great old year off come since against go came right used take
three house water light river stone garden letter engine paper winter market window harbour road
""".split()  # noqa: SIM905  # a list of this length would be unreadable
_SENTENCE_WORDS = (6, 18)


class Prose:
    """Seeded: the same seed gives the same passages in the same order."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._count = 0
        self._label = f"{seed:x}-{self._chance.randrange(1 << 32):08x}"

    def passage(self, num_chars: int) -> str:
        """About so many characters, whole words, beginning unlike every other."""
        self._count += 1
        heading = f"{self._count}/{self._label}. "
        rest = max(num_chars - len(heading), 1)
        sentences, length = [], 0
        while length <= rest:
            words = self._chance.choices(_WORDS, k=self._chance.randint(*_SENTENCE_WORDS))
            sentence = " ".join(words).capitalize() + "."
            sentences.append(sentence)
            length += len(sentence) + 1
        return heading + " ".join(sentences)[:rest]
