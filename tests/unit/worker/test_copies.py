"""Small backups go together, and none of them waits for ever."""

import pytest

from quire.messages import Backup, Load
from quire.transfer.base import Copy
from quire.types import PageStatus, page_array, page_ids
from quire.worker.copies import ComponentPools, CopyTracker, together
from quire.worker.tasks import Reporter


class FakeEngine:
    backup_pages = 4

    def __init__(self):
        self.backups = []
        self.copies = []
        self.error = None

    def backup(self, device_pages, host_pages):
        if self.error is not None:
            raise self.error
        self.backups.append((page_array(device_pages).tolist(), page_array(host_pages).tolist()))
        self.copies.append(Copy(1))
        return self.copies[-1]


class Rig:
    def __init__(self):
        self.now = 0.0
        self.reports = []
        self.errors = []
        self.engine = FakeEngine()
        reporter = Reporter(0, lambda: self.now, self.reports.append, self.errors.append)
        self.tracker = CopyTracker(reporter)
        self.pools = ComponentPools(device=None, host=None, engine=self.engine)

    def back_up(self, op, *pages):
        ids = page_ids(pages)
        host = page_ids([page + 100 for page in pages])
        self.tracker.back_up(Backup(op, "full", ids, host), self.pools)

    def ended(self):
        return [(report.op, list(report.statuses), report.final) for report in self.reports]


@pytest.fixture
def rig():
    return Rig()


def test_enough_pages_are_copied_at_once(rig):
    rig.back_up(1, 0, 1, 2, 3)
    assert rig.engine.backups == [([0, 1, 2, 3], [100, 101, 102, 103])]


def test_small_ones_are_one_copy_and_answer_for_themselves(rig):
    rig.back_up(1, 7)
    rig.back_up(2, 3, 9)
    rig.tracker.poll()
    assert not rig.engine.backups
    assert len(rig.tracker) == 2
    assert (1, "full") in rig.tracker
    rig.back_up(3, 5)
    assert rig.engine.backups == [([7, 3, 9, 5], [107, 103, 109, 105])]
    rig.tracker.poll()
    assert not rig.reports
    rig.engine.copies[0].layers_moved(1)
    rig.tracker.poll()
    assert rig.ended() == [(1, [0], True), (2, [0, 0], True), (3, [0], True)]
    assert not len(rig.tracker)


def test_a_small_one_alone_is_copied_soon(rig):
    rig.back_up(1, 7)
    rig.now = 0.005
    rig.tracker.poll()
    assert not rig.engine.backups
    rig.now = 0.02
    rig.tracker.poll()
    assert rig.engine.backups == [([7], [107])]


def test_if_they_cannot_be_begun_all_of_them_fail(rig):
    rig.back_up(1, 7)
    rig.back_up(2, 8)
    rig.engine.error = RuntimeError("no stream")
    rig.now = 1.0
    rig.tracker.poll()
    failed = int(PageStatus.FAILED)
    assert rig.ended() == [(1, [failed], True), (2, [failed], True)]
    assert rig.errors == [rig.engine.error]


def test_loads_that_came_together_are_cut_up_where_there_is_enough_for_a_copy():
    """Whoever came first does not wait for what all the others load."""
    sizes = [1, 1, 4, 2, 2, 9, 1]
    loads = [Load(op, "full", page_ids(range(n)), page_ids(range(n))) for op, n in enumerate(sizes)]
    found = list(together(loads, 4))
    assert [[load.op for load in some] for some in found] == [[0, 1, 2], [3, 4], [5], [6]]
    assert list(together([], 4)) == []
