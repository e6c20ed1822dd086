"""Lane: bounded, fair between long and short tasks, and it ends."""

import threading

from quire.worker.lanes import Lane


class Steps:
    """A task of `count` steps that writes down what happens to it."""

    wide = False

    def __init__(self, name, count, log, gate=None):
        self.name, self.left, self.log, self.gate = name, count, log, gate
        self.entered = threading.Event()
        self.ended = threading.Event()

    @property
    def has_more(self):
        return self.left > 0

    def take(self):
        return self.step if self.left else None

    def step(self):
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(120)
        self.left -= 1
        self.log.append(self.name)
        if self.left == 0:
            self.ended.set()

    def fail(self, error):
        self.log.append(f"{self.name}: {error}")
        self.ended.set()

    def cancel(self):
        self.log.append(f"{self.name} cancelled")
        self.ended.set()


def test_tasks_take_turns():
    log, gate = [], threading.Event()
    lane = Lane("test", 1, 10)
    tasks = [Steps("long", 3, log, gate), Steps("short", 1, log)]
    for task in tasks:
        assert lane.submit(task)
    gate.set()
    assert all(task.ended.wait(120) for task in tasks)
    assert log == ["long", "short", "long", "long"]
    assert lane.close(10)


def test_a_raising_task_fails_alone():
    class Broken(Steps):
        def step(self):
            self.left = 0
            raise ValueError("broken")

    log = []
    lane = Lane("test", 1, 10)
    tasks = [Broken("a", 1, log), Steps("b", 1, log)]
    for task in tasks:
        lane.submit(task)
    assert all(task.ended.wait(120) for task in tasks)
    assert log == ["a: broken", "b"]
    lane.close(10)


def test_a_full_lane_takes_no_more_unless_forced():
    log, gate = [], threading.Event()
    lane = Lane("test", 1, 1)
    running = Steps("running", 1, log, gate)
    lane.submit(running)
    assert running.entered.wait(120)
    assert lane.submit(Steps("queued", 1, log))
    assert not lane.submit(Steps("refused", 1, log))
    assert lane.submit(Steps("forced", 1, log), force=True)
    gate.set()
    assert lane.close(10, drain=True)
    assert log == ["running", "queued", "forced"]
    assert not lane.submit(Steps("late", 1, log), force=True)


def test_closing_cancels_what_is_queued_and_what_is_not_finished():
    log, gate = [], threading.Event()
    lane = Lane("test", 1, 10)
    running = Steps("running", 2, log, gate)
    lane.submit(running)
    lane.submit(Steps("queued", 1, log))
    assert running.entered.wait(120)
    assert not lane.close(0.01)  # still inside a step
    gate.set()
    assert lane.close(10)
    assert log == ["queued cancelled", "running", "running cancelled"]


def test_all_threads_work_on_one_wide_task_if_there_is_no_other():
    class Wide:
        wide = True

        def __init__(self):
            self.left, self.together, self.ended = 3, threading.Barrier(3), threading.Event()

        @property
        def has_more(self):
            return self.left > 0

        def take(self):
            self.left -= 1
            return self.piece if self.left >= 0 else None

        def piece(self):
            if self.together.wait(120) == 0:  # passes only with all three inside
                self.ended.set()

    lane = Lane("test", 3, 10)
    task = Wide()
    lane.submit(task)
    assert task.ended.wait(120)
    assert lane.close(10)
