"""A store that does as it is told, and small helpers to drive workers by hand."""

import hashlib
import threading
import time

from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.memory.page_layout import PageLayout
from quire.transfer import open_copy_engine
from quire.types import PageKey, PageStatus
from quire.worker.config import IoLimits
from quire.worker.worker import CacheWorker, ComponentPools

LAYOUT = PageLayout("full", 3, 2, 8, "float32", 4)
WAIT_S = 120.0
"""Only how long a broken test takes to fail."""


def keys(count, salt="k"):
    return [PageKey(hashlib.sha256(f"{salt}{i}".encode()).digest()) for i in range(count)]


def content(key):
    return (key * (LAYOUT.page_stride_bytes // len(key) + 1))[: LAYOUT.page_stride_bytes]


class FakeStore:
    """A PageStore in memory. Closed gates hold calls; `fail` and `fail_at` raise."""

    def __init__(self, held=()):
        self.pages = {}
        self.fail = None
        self.fail_at = None
        self.calls = []
        self.touched = []
        self.paces = {}
        """By how many pages were found."""
        self.closed = threading.Event()
        self.entered = threading.Semaphore(0)
        self.gates = {name: threading.Event() for name in ("get", "put", "contains")}
        for name, gate in self.gates.items():
            if name not in held:
                gate.set()

    def stock(self, page_keys):
        for key in page_keys:
            self.pages[key] = content(key)

    def _call(self, name, argument):
        assert not self.closed.is_set(), "used after close"
        self.calls.append((name, argument))
        self.entered.release()
        assert self.gates[name].wait(WAIT_S)
        assert not self.closed.is_set(), "closed under a user"
        if self.fail is not None:
            raise self.fail
        if self.fail_at == len(self.calls):
            raise OSError("this call fails")

    def counters(self):
        return {}

    def find(self, part, queries, *, deadline, each):
        self._call("contains", queries)
        assert not each
        found = [bytes(key in self.pages for key in query) for query in queries]
        return [there.partition(b"\0")[0].ljust(len(there), b"\0") for there in found]

    def pace(self, part, page_keys):
        return self.paces.get(len(page_keys), 1.0)

    def touch(self, part, page_keys, *, used_ns, each=False):
        self.touched.append((list(page_keys), each))

    def get(self, part, page_keys, pages, *, deadline):
        self._call("get", list(page_keys))
        statuses = []
        for key, page in zip(page_keys, pages, strict=True):
            if key not in self.pages:
                statuses.append(PageStatus.MISS)
                continue
            page[:] = self.pages[key]
            statuses.append(PageStatus.OK)
        return statuses

    def put(self, part, page_keys, pages, *, deadline, parents, owners, used_ns):
        self._call("put", list(page_keys))
        for key, page in zip(page_keys, pages, strict=True):
            self.pages[key] = bytes(page)
        return [PageStatus.OK] * len(page_keys)

    def clear(self):
        self.pages.clear()

    def close(self):
        self.closed.set()


class HandClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_worker(rank=0, num_ranks=1, *, open_store=None, limits=None, clock=time.monotonic):
    device = DevicePool.allocate(LAYOUT, 16)
    host = HostPool(LAYOUT, 64)
    pools = ComponentPools(device, host, open_copy_engine(device, host))
    return CacheWorker(
        rank,
        num_ranks,
        {"full": pools},
        model_fingerprint="m",
        open_store=open_store,
        limits=limits or IoLimits(batch_pages=4, fetch_threads=1, write_threads=1),
        clock=clock,
    )


def collect(group, enough):
    """Poll until `enough(completions so far)`."""
    completions = []
    deadline = time.monotonic() + WAIT_S
    while not enough(completions):
        assert time.monotonic() < deadline, f"still waiting with {completions}"
        completions += group.poll()
        time.sleep(0.001)
    return completions


def finals(completions):
    """Operations that have had their last report (a probe or a change has only the one)."""
    return [c.op for c in completions if getattr(c, "final", True) and hasattr(c, "op")]


def run(group, *commands, num_finals=None):
    group.submit(list(commands))
    wanted = len(commands) if num_finals is None else num_finals
    return collect(group, lambda completions: len(finals(completions)) >= wanted)


def statuses(completions, op):
    """All statuses of an operation, checking that the reports are consecutive, the last final."""
    reports = [c for c in completions if getattr(c, "op", None) == op]
    joined = b""
    for report in reports:
        assert report.first == len(joined)
        joined += report.statuses
    assert [report.final for report in reports] == [False] * (len(reports) - 1) + [True]
    return [PageStatus(status) for status in joined]
