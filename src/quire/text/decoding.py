"""TextStream: the bytes of tokens → text, as far as it is certain, with stop strings.

Knows bytes and characters, nothing of tokens. Two things are held back:

    an unfinished UTF-8 sequence     its other bytes come with a later token
    the beginning of a stop string   it may turn out to be one

What comes out does not depend on how the bytes were cut into pieces. The stop string that counts
is the one completed first, reading character by character; of those completed by the same
character, the longest. Text ends where it begins.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_utf8 = codecs.getincrementaldecoder("utf-8")


class TextStream:
    def __init__(self, stops: Sequence[str] = ()) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._longest_hold = max(map(len, self._stops), default=1) - 1
        self._decoder = _utf8("replace")
        self._held = ""
        self.stopped = False
        """A stop string was met: nothing more comes out."""
        self.num_chars = 0
        """Characters decoded so far, held back or not."""

    def push(self, piece: bytes) -> str:
        """The text that has become certain."""
        return self._advance(self._decoder.decode(piece))

    def finish(self) -> str:
        """The rest. An unfinished sequence ends as one U+FFFD, as it does in a whole decoding."""
        text = self._advance(self._decoder.decode(b"", True)) + self._held
        self._held = ""
        return text

    def _advance(self, new: str) -> str:
        if self.stopped or not new:
            return ""
        self.num_chars += len(new)
        text = self._held + new
        cut = self._find_stop(text)
        if cut is not None:
            self.stopped = True
            self._held = ""
            return text[:cut]
        keep = len(text) - self._hold(text)
        self._held = text[keep:]
        return text[:keep]

    def _find_stop(self, text: str) -> int | None:
        """Where the stop string begins that is completed first, if there is one."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _hold(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest_hold, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
