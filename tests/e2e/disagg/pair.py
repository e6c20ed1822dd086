"""Prefill and decode engines in this process, each stepped in turn, over real sockets and stores.

What is the same for engines in processes of their own is tried here, where everything can be
looked into and made to fail.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from e2e.disagg.transports import CHOSEN
from e2e.exactness.oracle import Answer
from e2e.exactness.rig import PATIENCE_S, PAUSE_S, EngineRig
from e2e.exactness.scenarios import check
from e2e.exactness.subjects import PAGE, Prompt, Subject
from quire.components import PoolSize
from quire.engine import build, executor
from quire.engine.config import EngineConfig, Role
from quire.engine.engine import Engine
from quire.engine.forward.dense import load_dense
from quire.engine.messages import CachedTokens, Output, Outputs
from quire.manager.costs import CostModel, Way
from quire.models import load_model
from quire.types import Tier

SECRET = "between us, and nobody else"


@functools.cache
def loaded(_side: str, *args: Any, **options: Any) -> Any:
    """One model for each engine that lives at the same time."""
    return load_model(*args, **options)


@functools.cache
def loaded_dense(_side: str, *args: Any, **options: Any) -> Any:
    return load_dense(*args, **options)


class Pair(EngineRig):
    """Asks the decode engine, and steps everybody."""

    def __init__(self, prefills: list[Engine], decode: Engine) -> None:
        super().__init__(decode)
        self.prefills = prefills
        self.decode = decode
        self.each_step: Callable[[], None] = lambda: None

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefills, self.decode]

    def ask(self, subject: Subject, prompts: Sequence[Prompt], what: str) -> list[Answer]:
        answers = self.answer(prompts, subject.num_tokens)
        check(subject, prompts, answers, what)
        return answers

    def settle(self) -> None:
        """Until nothing is in flight anywhere; then everything must have been given back."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(self._is_quiet(engine) for engine in self.engines):
            assert time.monotonic() < deadline, [e.requests() for e in self.engines]
            self.steps(1)
            time.sleep(PAUSE_S)
        for engine in self.engines:
            self.check_clean(engine)

    def _is_quiet(self, engine: Engine) -> bool:
        """Nor does a write wait for its time to be tried again."""
        busy = len(engine.scheduler) or engine.manager.waiting_writes
        return engine.manager.idle and not busy

    def check_clean(self, engine: Engine) -> None:
        engine.manager.check_invariants()
        assert not engine.manager.leases
        assert engine.exchange is not None
        assert not engine.exchange.receiver.open
        assert not engine.exchange.receiver.num_asked
        assert not engine.exchange.giver.open

    def flush(self, *tiers: Tier) -> None:
        self.settle()
        for engine in self.engines:
            for tier in tiers:
                engine.manager.flush(tier)

    def sent_pages(self) -> int:
        return sum(engine.manager.counters.exported_pages for engine in self.prefills)

    def total(self) -> CachedTokens:
        sums = {
            name: sum(getattr(cached, name) for cached in self.cached)
            for name in CachedTokens.__struct_fields__
        }
        return CachedTokens(**sums)

    def steps(self, count: int) -> list[Output]:
        outputs = []
        for _ in range(count):
            self.each_step()
            worked = [engine.step() for engine in self.engines]
            for message in self.decode.take_messages():
                if isinstance(message, Outputs):
                    outputs += message.outputs
            if not any(worked):
                time.sleep(PAUSE_S)
        return outputs


@contextlib.contextmanager
def engines(
    subject: Subject,
    *,
    device_pages: int = 256,
    host_pages: int = 512,
    snapshots: int = 64,
) -> Iterator[Callable[..., Engine]]:
    """Gives a function that makes engines of one model; they end with the block."""
    sizes = {
        "full": PoolSize(device_pages, host_pages),
        "window": PoolSize(device_pages, host_pages),
        "recurrent": PoolSize(snapshots, snapshots),
    }
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            build, "plan_pools", lambda *_: {name: sizes[name] for name in subject.components}
        )
        # A tiny model computes faster than any store delivers.
        patch.setattr(CostModel, "choose", lambda *_, **__: Way.FETCH)
        number = 0

        def make(role: Role, **options: Any) -> Engine:
            nonlocal number
            number += 1
            side = f"{role.value}-{number}"
            patch.setattr(executor.rank, "load_model", functools.partial(loaded, side))
            patch.setattr(executor.rank, "load_dense", functools.partial(loaded_dense, side))
            config = EngineConfig(
                model=str(subject.find()),
                name=subject.name,
                page_size=PAGE,
                device_bytes=1,
                host_bytes=1,
                threads=subject.threads,
                role=role,
                peer_port=0,
                peer_secret=SECRET,
                debug=True,
                **({"prefetch_threshold": PAGE, "peer_transport": CHOSEN} | options),
            )
            engine = build.build_engine(config)
            stack.callback(engine.close)
            return engine

        yield make


@contextlib.contextmanager
def pair(
    subject: Subject,
    store: str | None = None,
    *,
    num_prefills: int = 1,
    prefill_options: dict[str, Any] | None = None,
    decode_options: dict[str, Any] | None = None,
    **pools: int,
) -> Iterator[Pair]:
    with engines(subject, **pools) as make:
        prefills = [
            make(Role.PREFILL, store=store, **(prefill_options or {})) for _ in range(num_prefills)
        ]
        addresses = [engine.info.peer for engine in prefills]
        decode = make(Role.DECODE, store=store, prefill=addresses, **(decode_options or {}))
        yield Pair(prefills, decode)
