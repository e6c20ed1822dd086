"""`quire bench core`: what the metadata path costs per request, with instant workers.

Times only the manager and the building of keys: match, lease, probe, load, allocate, evict,
commit, backup, write, release. The workers behind it answer at once and their time is not counted
(quire.worker.instant); the third tier keeps all that was written.

    chat            2,000 sessions × 8 turns, 200 of them active at a time, 20 shared system prompts
                    of 2k tokens, 500–700 new tokens per turn, a device of 1M tokens
    longdoc         200 documents of 64k tokens, 5 questions each, random order, a device of 6.5M
    chat_scattered  chat with all sessions active at once and a small host: most turns find their
                    history on the host or in the store, so loads, fetches and the eviction of
                    host pages are in the figure

Requests come one per step, and their time is that of the process, less what reading its clock takes
(a microsecond and more where it is a system call). What they compute is committed at
once, in chunks of 32 pages as a prompt is, and page by page as an answer is: rows of their own. The
host holds ten times as much as the device, a common proportion, and twice as much in
chat_scattered.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config import CacheConfig
from quire.keys import Namespace, PrefixKey
from quire.manager import CacheManager
from quire.progress import Progress
from quire.types import RequestId
from quire.worker.instant import InstantWorker

PAGE_SIZE = 64
PIECES = {"by chunk": 32, "by page": 1}
"""Pages per commit, where not all are committed at once."""
_VOCABULARY = 50_000


@dataclass(frozen=True)
class CoreWorkload:
    name: str
    prompts: Callable[[], Iterator[npt.NDArray[np.int32]]]
    num_requests: int
    device_tokens: int
    host_factor: int = 10
    """Host capacity in terms of the device's."""


def chat(
    sessions: int = 2000, turns: int = 8, device_tokens: int = 1_000_000, active: int = 200
) -> CoreWorkload:
    def prompts() -> Iterator[npt.NDArray[np.int32]]:
        rng, pick = np.random.default_rng(7), random.Random(7)
        systems = [random_tokens(rng, 2048) for _ in range(20)]
        history = [systems[i % 20] for i in range(sessions)]
        turns_left = [turns] * sessions
        waiting = iter(range(active, sessions))
        running = list(range(active))
        while running:
            at = pick.randrange(len(running))
            session = running[at]
            turn = random_tokens(rng, int(rng.integers(500, 701)))
            history[session] = np.concatenate([history[session], turn])
            yield history[session]
            turns_left[session] -= 1
            if turns_left[session] == 0:
                running[at : at + 1] = islice(waiting, 1)

    if active < sessions:
        return CoreWorkload("chat", prompts, sessions * turns, device_tokens)
    return CoreWorkload("chat_scattered", prompts, sessions * turns, device_tokens, host_factor=2)


def longdoc(
    documents: int = 200, questions: int = 5, device_tokens: int = 6_500_000
) -> CoreWorkload:
    def prompts() -> Iterator[npt.NDArray[np.int32]]:
        rng = np.random.default_rng(11)
        texts = [random_tokens(rng, 65536) for _ in range(documents)]
        order = [i for i in range(documents) for _ in range(questions)]
        random.Random(11).shuffle(order)
        for document in order:
            yield np.concatenate([texts[document], random_tokens(rng, 160)])

    return CoreWorkload("longdoc", prompts, documents * questions, device_tokens)


def run(*, rounds: int = 5, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """All workloads, with and without a store, in alternation.

    The figure is the fastest round: what else happens on the machine only ever adds.
    """
    result: dict[str, Any] = {}
    for name, workload, piece in _cases():
        with_store, without = [], []
        for _ in range(rounds if piece is None else 1):
            with_store.append(measure(workload, store=True, piece=piece, progress=progress))
            without.append(measure(workload, store=False, piece=piece, progress=progress))
        result[name] = {
            "us_per_request": min(sample["us_per_request"] for sample in with_store),
            "us_per_request_no_store": min(sample["us_per_request"] for sample in without),
            "requests": workload.num_requests,
            "hit_rate": with_store[0]["hit_rate"],
        }
    return result


def _cases() -> Iterator[tuple[str, CoreWorkload, int | None]]:
    """Each with its name, and the pages of a commit."""
    for workload in (chat(), longdoc(), chat(active=2000)):
        yield workload.name, workload, None
    for workload in (chat(), longdoc()):
        for name, piece in PIECES.items():
            yield f"{workload.name}, {name}", workload, piece


def measure(
    workload: CoreWorkload,
    *,
    store: bool,
    piece: int | None = None,
    before: Callable[[StepTimer, Namespace], None] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, float]:
    """`piece`: pages per commit; None: all at once. `before`: what is done before, uncounted."""
    device_pages = workload.device_tokens // PAGE_SIZE
    config = CacheConfig(
        page_size=PAGE_SIZE,
        device_pages=device_pages,
        host_pages=device_pages * workload.host_factor,
    )
    manager = CacheManager(config, clock=time.monotonic)
    worker = InstantWorker()
    if store:
        manager.store.attach("memory://")
        manager.step(worker.answer(manager.step()))
    namespace = Namespace("bench", "bfloat16", PAGE_SIZE)
    reused = asked = 0
    label = f"{workload.name}{'' if store else ', no store'}"
    if before is not None:
        before(StepTimer(manager, worker), namespace)
    timer = StepTimer(manager, worker)
    gc.collect()
    for done, tokens in enumerate(workload.prompts(), start=1):
        reused += serve(timer, namespace, tokens, piece)
        asked += len(tokens) // PAGE_SIZE
        progress(label, done, workload.num_requests)
    return {
        "us_per_request": round(timer.spent_s / workload.num_requests * 1e6, 1),
        "hit_rate": round(reused / max(1, asked), 3),
    }


def serve(
    timer: StepTimer, namespace: Namespace, tokens: npt.NDArray[np.int32], piece: int | None
) -> int:
    """A request through its whole life; pages reused."""
    manager = timer.manager
    timer.start()
    key = PrefixKey(namespace, tokens)
    lease = manager.acquire(manager.match(key), RequestId("request"))
    manager.prefetch(lease)
    timer.step_until_quiet()  # probes, then fetches
    manager.admit(lease)
    manager.load(lease)
    reused = lease.num_device
    timer.step_until_quiet()  # loads
    if not manager.extend(lease, key.num_pages - reused):
        raise AssertionError("the benchmark's device is too small for one request")
    for end in range(reused + piece, key.num_pages, piece) if piece is not None else ():
        manager.commit(lease, key[:end])
    manager.commit(lease, key)
    manager.release(lease)
    timer.step_until_quiet()  # backups, then writes
    manager.next_wakeup()  # as an engine asks before it sleeps
    timer.stop()
    return reused


class StepTimer:
    """Counts the time between start and stop, less what the workers take to answer, and less what
    a start and a stop with nothing between them would count."""

    def __init__(self, manager: CacheManager, worker: InstantWorker) -> None:
        self.manager = manager
        self._worker = worker
        self.spent_s = self._begun_s = self._reading_s = 0.0
        self._reading_s = statistics.median(self._count_nothing() for _ in range(1000))
        self.spent_s = 0.0

    def start(self) -> None:
        self._begun_s = time.process_time()

    def stop(self) -> None:
        self.spent_s += time.process_time() - self._begun_s - self._reading_s

    def _count_nothing(self) -> float:
        self.spent_s = 0.0
        self.start()
        self.stop()
        return self.spent_s

    def step_until_quiet(self) -> None:
        commands = self.manager.step()
        while commands:
            self.stop()
            reports = self._worker.answer(commands)
            self.start()
            commands = self.manager.step(reports)


def random_tokens(rng: np.random.Generator, count: int) -> npt.NDArray[np.int32]:
    return rng.integers(0, _VOCABULARY, count, dtype=np.int32)
