"""Recorder: a trace of what was asked, for `quire replay`. Lengths and digests, never a token.

    event loop ──take──▶ queue, bounded ──▶ thread: digests, one line of JSON ──▶ file, bounded

A block's digest is chained over all blocks before it, from the request's cache salt on, and keyed
with random bytes that are made with the file and written nowhere: equal prefixes can be told from
different ones, and no guess at a prompt can be tried on it. When the file is full, or cannot be
written, recording ends; serving does not.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from quire.errors import ConfigError

TRACE_VERSION = 1
BLOCK_TOKENS = 128
"""About; a whole number of pages."""
_MAX_QUEUED_BYTES = 64 << 20
_ASKED_BYTES = 1024
"""Of one request in the queue, beside its tokens."""
_TOKEN_BYTES = 4
_ID_MASK = (1 << 63) - 1
_CLOSE_S = 5.0

logger = logging.getLogger("quire.server")


class Asked(NamedTuple):
    at_s: float
    tokens: bytes
    """Of the prompt, int32."""
    salt: str
    answer: Sequence[int]

    @property
    def size_bytes(self) -> int:
        return _ASKED_BYTES + len(self.tokens) + _TOKEN_BYTES * len(self.answer)


class Recorder:
    def __init__(
        self, file: Path, *, page_size: int, bytes_per_token: int, max_bytes: int, now_s: float
    ) -> None:
        """`now_s` is when it begins, on the clock of `take`. Raises ConfigError."""
        self._block_tokens = -(-BLOCK_TOKENS // page_size) * page_size
        self._key = secrets.token_bytes(32)
        self._left_bytes = max_bytes
        self._began_s = now_s
        self.num_dropped = 0
        """Requests that came faster than they could be written."""
        try:
            number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise cannot_record(file, error.strerror or str(error)) from error
        self._writing = os.fdopen(number, "wb")
        heading = {
            "quire_trace": TRACE_VERSION,
            "block_tokens": self._block_tokens,
            "bytes_per_token": bytes_per_token,
        }
        self._put(msgspec.json.encode(heading))
        self._queue: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._thread = threading.Thread(target=self._run, name="quire-record", daemon=True)
        self._thread.start()

    def take(self, asked: Asked) -> None:
        """Never waits for the file."""
        with self._lock:
            if self._queued_bytes + asked.size_bytes > _MAX_QUEUED_BYTES:
                self.num_dropped += 1
                return
            self._queued_bytes += asked.size_bytes
        self._queue.put(asked)

    def close(self) -> None:
        """Once what was taken is written."""
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        with self._writing:
            while (asked := self._queue.get()) is not None:
                with self._lock:
                    self._queued_bytes -= asked.size_bytes
                line = msgspec.json.encode(self._line(asked))
                if self._left_bytes <= 0:
                    continue
                try:
                    if not self._put(line):
                        logger.warning("the recording is full: no more requests are recorded")
                    if self._queue.empty():
                        self._writing.flush()
                except OSError as error:
                    self._left_bytes = 0
                    logger.warning("recording ended: %s", error)
        if self.num_dropped:
            logger.warning("%d requests were not recorded: too many came at once", self.num_dropped)

    def _put(self, line: bytes) -> bool:
        """Did it fit?"""
        if len(line) + 1 > self._left_bytes:
            self._left_bytes = 0
            self._writing.flush()
            return False
        self._writing.write(line + b"\n")
        self._left_bytes -= len(line) + 1
        return True

    def _line(self, asked: Asked) -> dict[str, object]:
        block = self._block_tokens * _TOKEN_BYTES
        answer = np.asarray(asked.answer, dtype="<i4").tobytes()
        ids = self._digests(asked.salt, asked.tokens + answer)
        num_prompt = len(asked.tokens) // block
        return {
            "timestamp": max(round((asked.at_s - self._began_s) * 1000), 0),
            "input_length": len(asked.tokens) // _TOKEN_BYTES,
            "output_length": len(asked.answer),
            "hash_ids": ids[:num_prompt],
            "answer_ids": ids[num_prompt:],
        }

    def _digests(self, salt: str, tokens: bytes) -> list[int]:
        """Of whole blocks."""
        block = self._block_tokens * _TOKEN_BYTES
        before = hashlib.blake2b(salt.encode(), key=self._key, digest_size=16).digest()
        ids = []
        for start in range(0, len(tokens) - block + 1, block):
            content = before + tokens[start : start + block]
            before = hashlib.blake2b(content, key=self._key, digest_size=16).digest()
            ids.append(int.from_bytes(before[:8], "little") & _ID_MASK)
        return ids


def cannot_record(file: Path, why: str) -> ConfigError:
    return ConfigError(
        f"requests cannot be recorded to {str(file)!r} ({why}): name a new file in a directory "
        "that can be written"
    )
