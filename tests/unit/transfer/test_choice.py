"""Which mover is taken: the fastest, or one that is nearly as fast and leaves the model alone."""

import itertools

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, WorkerError
from quire.transfer import choice
from quire.transfer.choice import choose
from quire.transfer.kinds import MoverKind
from quire.transfer.movers import Ends, IndexMover, Move
from transfer_cases import LAYOUTS, Pools

INDEX, KERNEL = MoverKind.INDEX, MoverKind.KERNEL
RECTANGLES, STAGED = MoverKind.RECTANGLES, MoverKind.STAGED


class FakeClock:
    """Time that passes as it is told to, between two looks at it."""

    def __init__(self):
        self.now = 0.0
        self.running = 0.0

    def __call__(self):
        return self.now

    def wait(self):
        """For what has been launched."""
        self.now += self.running
        self.running = 0.0


class FakeMover:
    """A copy takes `seconds`, of which the launching thread is busy for `launch_s`."""

    def __init__(self, kind, seconds, clock, launch_s=0.0):
        self.kind, self.seconds, self.clock, self.launch_s = kind, seconds, clock, launch_s

    def plan(self, device_pages, host_pages):
        def launch(layers):
            self.clock.now += self.launch_s
            self.clock.running += self.seconds - self.launch_s

        return Move(launch, 1000)


def measured(monkeypatch, seconds, launches):
    """What is chosen, and what has been tried, if a plain copy takes a second."""
    clock, opened = FakeClock(), []

    def open_one(kind, ends, *, to_device):
        if kind.value not in seconds:
            raise ConfigError("not here")
        opened.append(kind.value)
        return FakeMover(kind, seconds[kind.value], clock, launches.get(kind.value, 0.0))

    def plain_rate(ends, num_pages, clock, *, to_device):
        return num_pages * ends.device.layout.page_bytes / 1.0

    monkeypatch.setattr(choice, "_LEAST_BYTES", 0)
    monkeypatch.setattr(choice, "_open", open_one)
    monkeypatch.setattr(choice, "_plain_rate", plain_rate)
    monkeypatch.setattr(choice, "_wait", lambda ends: clock.wait())
    chosen = choose(Pools(LAYOUTS[0], "cpu", 0).ends(), MoverKind.AUTO, clock)
    assert chosen.loads.kind is chosen.backups.kind
    assert all(name in chosen.reason for name in opened)
    return chosen.loads.kind.value, len(opened) // 2


@pytest.mark.parametrize(
    ("seconds", "taken", "tried"),
    [
        ({"rectangles": 1.1, "pieces": 1.05, "staged": 1.0}, "pieces", 2),  # good enough
        ({"rectangles": 1.2, "pieces": 1.3, "staged": 1.04, "kernel": 1.0}, "staged", 3),
        ({"rectangles": 1.2, "pieces": 1.3, "staged": 1.25, "kernel": 1.0}, "rectangles", 3),
        ({"rectangles": 9.0, "pieces": 9.0, "kernel": 1.3, "index": 1.5}, "kernel", 4),
        ({"kernel": 1.9, "index": 1.5}, "index", 2),
    ],
)
def test_the_fastest_of_the_copy_engines_or_of_all_if_those_are_bad(
    seconds, taken, tried, monkeypatch
):
    assert measured(monkeypatch, seconds, {}) == (taken, tried)


@pytest.mark.parametrize(
    ("launches", "taken"),
    [
        ({"pieces": 0.4}, "rectangles"),
        ({"pieces": 0.1}, "pieces"),
        ({"pieces": 0.4, "rectangles": 0.5, "staged": 0.1}, "staged"),
        ({"pieces": 0.4, "rectangles": 0.5, "staged": 0.9, "kernel": 0.9}, "pieces"),  # all are
    ],
)
def test_one_that_keeps_the_launching_thread_busy_is_taken_only_if_all_do(
    launches, taken, monkeypatch
):
    """It is in the way of the thread that launches the model: decoding beside such copies took half
    again as long."""
    seconds = {"rectangles": 1.05, "pieces": 1.02, "staged": 1.04, "kernel": 1.5}
    assert measured(monkeypatch, seconds, launches)[0] == taken


def test_what_else_the_machine_did_meanwhile_is_not_held_against_a_mover(monkeypatch):
    """Pages of 16 tokens went by slow rectangles after launches of the others had been late."""
    late = itertools.cycle([0.0, 0.5, 0.5, 0.0])

    def launch_late(mover):
        def launch(layers):
            busy = next(late) if mover.kind is STAGED else 0.0
            mover.clock.now += mover.launch_s + busy
            mover.clock.running += mover.seconds - mover.launch_s

        return Move(launch, 1000)

    monkeypatch.setattr(FakeMover, "plan", lambda mover, *pages: launch_late(mover))
    seconds = {"rectangles": 1.2, "pieces": 1.3, "staged": 1.05, "kernel": 1.5}
    assert measured(monkeypatch, seconds, {"staged": 0.15})[0] == "staged"


def test_without_driver_and_triton_torch_moves_them_and_the_reason_says_so(monkeypatch):
    """As here, or with Triton's interpreter, which is slower than torch."""
    monkeypatch.setattr(choice, "_LEAST_BYTES", 0)
    chosen = choose(Pools(LAYOUTS[0], "cpu", 0).ends(), MoverKind.AUTO)
    assert chosen.backups.kind in (INDEX, KERNEL)
    assert "rectangles: the driver's library cannot be used" in chosen.reason
    assert "index" in chosen.reason


def test_small_pools_are_not_measured():
    def no_clock():
        raise AssertionError("it was measured")

    chosen = choose(Pools(LAYOUTS[0], "cpu", 0).ends(), MoverKind.AUTO, no_clock)
    assert chosen.loads.kind in (INDEX, KERNEL)
    assert "too small to be measured" in chosen.reason


def test_a_mover_that_is_refused_when_it_is_tried_is_not_taken(monkeypatch):
    monkeypatch.setattr(choice, "_LEAST_BYTES", 0)

    def open_one(kind, ends, *, to_device):
        if kind is INDEX:
            return IndexMover(ends, to_device=to_device)
        if kind is not RECTANGLES:
            raise ConfigError("not here")
        refusing = FakeMover(kind, 0.0, FakeClock())
        refusing.plan = lambda device_pages, host_pages: Move(refuse, 1)
        return refusing

    def refuse(layers):
        raise WorkerError("refused")

    monkeypatch.setattr(choice, "_open", open_one)
    chosen = choose(Pools(LAYOUTS[0], "cpu", 0).ends(), MoverKind.AUTO)
    assert chosen.loads.kind is INDEX
    assert "rectangles: refused" in chosen.reason


def test_measuring_leaves_the_device_as_it_was(monkeypatch):
    monkeypatch.setattr(choice, "_LEAST_BYTES", 0)
    pools = Pools(LAYOUTS[0], "cpu", 1)
    pools.fill_device()
    before = pools.device_bytes()
    choose(pools.ends(), MoverKind.AUTO)
    assert torch.equal(pools.device_bytes(), before)


def test_one_that_was_asked_for_is_taken_or_refused():
    ends = Pools(LAYOUTS[0], "cpu", 0).ends()
    assert choose(ends, INDEX).reason == "by index, as set"
    with pytest.raises(ConfigError, match="driver"):
        choose(ends, RECTANGLES)


def test_without_host_pages_nothing_is_measured():
    ends = Pools(LAYOUTS[0], "cpu", 0).ends()
    none = Ends(ends.device, ends.host[:0], ends.host_bytes[:0])
    assert choose(none, MoverKind.AUTO).reason == "no host pages, no copies"


def test_what_is_measured_is_scattered_over_both_pools():
    from quire.transfer.choice import _some_pages

    there, here = _some_pages(Pools(LAYOUTS[0], "cpu", 0).ends())
    assert len(there) == len(here) == len(np.unique(there)) == len(np.unique(here))
