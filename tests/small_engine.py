"""A real Engine in this process, on a tiny model with real weights: ask, run, compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.engine.messages import Generate, Output, Outputs, SamplingParams
from quire.types import RequestId

PAGE = 8
PATIENCE_S = 900.0
"""Only how long a broken test takes to fail."""


class SmallEngine:
    def __init__(self, model: Path, **options: Any) -> None:
        given = {
            "model": str(model),
            "name": "small",
            "page_size": PAGE,
            "device_bytes": 4 << 20,
            "host_bytes": 4 << 20,
            "threads": 1,
            "chunk_tokens": 24,
            "debug": True,
        }
        self.engine = build_engine(EngineConfig(**given | options))
        self.outputs: dict[RequestId, list[Output]] = {}
        self._number = 0

    def ask(
        self, prompt: Sequence[int], salt: str = "", said: Sequence[int] = (), **params: Any
    ) -> RequestId:
        self._number += 1
        request = RequestId(f"r{self._number}")
        self.outputs[request] = []
        tokens = np.array(prompt, dtype="<i4").tobytes()
        begun = np.array(said, dtype="<i4").tobytes()
        self.engine.handle(Generate(request, tokens, SamplingParams(**params), salt, said=begun))
        return request

    def run(self) -> None:
        """Until everything is answered and nothing moves any more."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.engine.scheduler) or not self.engine.manager.idle:
            assert time.monotonic() < deadline, self.engine.status()
            self.step()

    def step(self) -> None:
        if not self.engine.step():
            time.sleep(0.0005)
        for message in self.engine.take_messages():
            if isinstance(message, Outputs):
                for output in message.outputs:
                    self.outputs[output.id].append(output)

    def answer(self, prompt: Sequence[int], **params: Any) -> list[int]:
        request = self.ask(prompt, **params)
        self.run()
        return self.tokens(request)

    def tokens(self, request: RequestId) -> list[int]:
        assert not self.outputs[request][-1].error, self.outputs[request][-1].error
        return [token for output in self.outputs[request] for token in output.tokens]

    def logprobs(self, request: RequestId) -> list[Any]:
        return [each for output in self.outputs[request] for each in output.logprobs]

    def cached(self, request: RequestId) -> Any:
        return next(o.cached for o in self.outputs[request] if o.cached is not None)

    def accepted(self, request: RequestId) -> int:
        return sum(output.accepted for output in self.outputs[request])

    def __enter__(self) -> SmallEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.close()
