"""Many threads read pages of peers that leave, in a process of its own: what crashes it is seen.

    python -X faulthandler tests/reading_under_stress.py --seed 1 --rounds 20

One asker after the other fetches from a few holders through shared memory. At random moments a
fetch is cancelled, a grant is taken back and its pages are written over, a holder goes (closed, or
with `--kill` a process that is killed), the asker is closed with all under way, and the garbage is
collected. What must hold:

    every operation ends once
    a page that came is the page that was granted
    once an operation has ended nobody writes into its pages
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from quire.memory.page_layout import PageLayout
from quire.messages import Cancel, Command, Completion, Fetch, PeerPart, PeerSource, Serve
from quire.peer.identity import make_identity
from quire.peer.region import Region
from quire.peer.tickets import Tickets
from quire.types import OperationId, PageStatus, page_ids
from quire.worker import (
    ComponentConfig,
    IoLimits,
    LocalWorkers,
    PeerServing,
    WorkerConfig,
    build_worker,
)
from quire.worker.peering import PeerTask
from quire.worker.tasks import IoTask

HEADS = 4
LAYOUT = PageLayout("full", 4, HEADS, 32, "float32", 16)  # 64 KiB
HOLDER_PAGES, ASKER_PAGES, FETCH_PAGES = 96, 512, 64
UNTOUCHED, WRITTEN_OVER = 255, 254
END_S = 60.0
"""Only how long what hangs takes to fail."""


def workers(epoch: str, num_pages: int) -> LocalWorkers:
    peer = PeerServing(
        secret="s",
        epoch=epoch,
        identity=make_identity("m", [LAYOUT], {"full": HEADS}),
        heads={"full": (0, HEADS)},
        port=0,
    )
    config = WorkerConfig(
        0,
        1,
        "m",
        [ComponentConfig(LAYOUT, 4, num_pages)],
        io=IoLimits(peer_batch_pages=4),
        peer=peer,
    )
    return LocalWorkers([build_worker(config)])


def host_of(group: LocalWorkers) -> Any:
    """Its pages, as rows of bytes."""
    return group.workers[0].components["full"].host.raw().numpy()


class Holder(Protocol):
    epoch: str
    address: str

    def take_back(self) -> None:
        """The grant; and its pages are others' from then on."""

    def leave(self) -> None: ...


class HolderHere:
    """In this process: it closes while it is read from."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self._group = workers(epoch, HOLDER_PAGES)
        for page, row in enumerate(host_of(self._group)):
            row.fill(page)
        self.address = self._group.peer_addresses[0]
        self._group.submit([Serve(OperationId(1), "full", page_ids(range(HOLDER_PAGES)))])

    def take_back(self) -> None:
        self._group.submit([Cancel(OperationId(1))])
        deadline = time.monotonic() + END_S
        while not any(isinstance(each, Completion) for each in self._group.poll()):
            assert time.monotonic() < deadline, "the grant is still read from"
            time.sleep(0.0005)
        host_of(self._group).fill(WRITTEN_OVER)

    def leave(self) -> None:
        self._group.close()


class HolderElsewhere:
    """A process: it is killed while it is read from."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        command = [sys.executable, "-P", __file__, "--hold", epoch]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def take_back(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def leave(self) -> None:
        self._process.kill()
        self._process.communicate()


def hold(epoch: str) -> None:
    """Until its parent kills it, or is gone."""
    holder = HolderHere(epoch)
    print(holder.address, flush=True)
    for _ in sys.stdin:
        holder.take_back()


class Round:
    def __init__(self, rng: random.Random, holders: Sequence[Holder]) -> None:
        self.rng = rng
        self.holders = holders
        self.asker = workers("asker", ASKER_PAGES)
        self.host = host_of(self.asker)
        self.host.fill(UNTOUCHED)
        self.free = list(range(ASKER_PAGES))
        self.running: dict[OperationId, tuple[list[int], list[int]]] = {}
        """Host pages of each fetch, and which of the holder's are for them."""
        self.statuses: dict[OperationId, bytearray] = {}
        self.num_ok = self.num_begun = 0

    def play(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self._begin()
            if self.running and self.rng.random() < 0.2:
                self.asker.submit([Cancel(self.rng.choice(list(self.running)))])
            time.sleep(self.rng.random() * 0.002)
            self._hear()
        if self.rng.random() < 0.5:
            deadline = time.monotonic() + END_S
            while self.running:
                assert time.monotonic() < deadline, f"{len(self.running)} fetches never end"
                self._hear()
        self.asker.close()
        self._hear()
        assert not self.running, "fetches that were not ended when all was closed"

    def _begin(self) -> None:
        holder = self.rng.choice(self.holders)
        count = min(self.rng.randint(1, FETCH_PAGES), len(self.free))
        if count == 0:
            return
        self.num_begun += 1
        op = OperationId(self.num_begun)
        pages = self.rng.sample(self.free, count)
        self.free = [page for page in self.free if page not in set(pages)]
        first = self.rng.randrange(HOLDER_PAGES - count + 1)
        part = PeerPart(holder.address, 0, HEADS)
        source = PeerSource(holder.epoch, 1, first, [part], Tickets(b"").of(1))
        self.running[op] = pages, list(range(first, first + count))
        self.statuses[op] = bytearray()
        command: Command = Fetch(op, "full", b"", page_ids(pages), END_S, source)
        self.asker.submit([command])

    def _hear(self) -> None:
        for report in self.asker.poll():
            self.statuses[report.op] += report.statuses
            if report.final:
                self._ended(*self.running.pop(report.op), self.statuses.pop(report.op))

    def _ended(self, pages: list[int], theirs: list[int], statuses: bytearray) -> None:
        assert len(statuses) == len(pages), "a status for each page, once"
        for page, their, status in zip(pages, theirs, statuses, strict=True):
            row = self.host[page]
            if status == PageStatus.OK:
                self.num_ok += 1
                assert (row == their).all(), f"page {their} came as {sorted(set(row.tolist()))}"
            row.fill(UNTOUCHED)
        self.free += pages

    def check_untouched(self) -> None:
        """All has ended, and a moment has passed."""
        assert (self.host == UNTOUCHED).all(), "somebody wrote into pages of a fetch that had ended"


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    over = threading.Event()

    def collect() -> None:
        while not over.wait(0.02):
            gc.collect(1)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def play(seed: int, num_rounds: int, *, kills: bool) -> None:
    rng = random.Random(seed)
    make = HolderElsewhere if kills else HolderHere
    num_ok = 0
    with collecting():
        for number in range(num_rounds):
            holders = [make(f"{seed}-{number}-{which}") for which in range(2)]
            played = Round(rng, holders)

            def leave(holders: Sequence[Holder] = holders, seed: float = rng.random()) -> None:
                own = random.Random(seed)
                for holder in holders:
                    time.sleep(own.random() * 0.05)
                    if own.random() < 0.5:
                        holder.take_back()
                    holder.leave()

            leaving = threading.Thread(target=leave)
            leaving.start()
            played.play(rng.randint(5, 40))
            leaving.join()
            time.sleep(0.01)
            played.check_untouched()
            gc.collect()
            num_ok += played.num_ok
    left = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:q" in line]
    print(f"{num_ok} pages came; {len(left)} mappings are left")
    assert num_ok, "nothing was read: nothing was tried"


def sabotage() -> None:
    """A fetch ends with the first thread that leaves it; and threads are slow to copy."""
    copy = Region.copy_from

    def slowly(self: Region, *what: Any) -> None:
        time.sleep(0.002)
        copy(self, *what)

    def leave(self: IoTask) -> None:
        with self._lock:
            self._num_running -= 1
            was_over, self._is_over = self._is_over, True
            self._stop = self._stop or PageStatus.CANCELLED
        if not was_over:
            self._final_report()

    IoTask._leave = leave  # type: ignore[method-assign]
    Region.copy_from = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--sabotage", action="store_true")
    parser.add_argument("--hold", default="")
    given = parser.parse_args()
    if given.hold:
        hold(given.hold)
    else:
        PeerTask.wide = True  # as engines do not yet: one fetch read by several threads
        if given.sabotage:
            sabotage()
        play(given.seed, given.rounds, kills=given.kill)
