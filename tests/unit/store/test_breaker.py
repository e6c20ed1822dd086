from __future__ import annotations

import pytest

from quire.store.breaker import PATIENCE_S, Breaker, BreakerState


@pytest.fixture
def breaker(clock):
    return Breaker(clock, max_failures=3, cooldown_s=5)


def fail(breaker, times):
    for _ in range(times):
        assert breaker.enter()
        breaker.failure()


def test_opens_after_consecutive_failures_only(breaker):
    fail(breaker, 2)
    assert breaker.enter()
    breaker.success()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 1)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.enter()
    assert breaker.times_opened == 1


def test_one_trial_after_the_cooldown(breaker, clock):
    fail(breaker, 3)
    clock.now += 5
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.enter()
    assert not breaker.enter()


def test_successful_trial_closes(breaker, clock):
    fail(breaker, 3)
    clock.now += 5
    assert breaker.enter()
    breaker.success()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.enter()


def test_failed_trial_opens_for_another_cooldown(breaker, clock):
    fail(breaker, 3)
    clock.now += 5
    fail(breaker, 1)
    assert breaker.state is BreakerState.OPEN
    clock.now += 4.9
    assert not breaker.enter()
    clock.now += 0.1
    assert breaker.enter()


def test_trial_that_said_nothing_leaves_room_for_the_next(breaker, clock):
    fail(breaker, 3)
    clock.now += 5
    assert breaker.enter()
    breaker.leave()
    assert breaker.enter()


def test_late_failure_of_an_old_call_does_not_prolong_the_cooldown(breaker, clock):
    assert breaker.enter()
    fail(breaker, 3)
    clock.now += 4
    breaker.failure()
    clock.now += 1
    assert breaker.enter()


def test_short_silences_add_up_and_are_forgotten_with_an_answer(clock):
    breaker = Breaker(clock, max_failures=1)
    for _ in range(2):
        for _ in range(4):
            assert breaker.enter()
            breaker.silence(PATIENCE_S / 5)
        assert breaker.enter()
        breaker.success()
    for _ in range(6):
        breaker.enter()
        breaker.silence(PATIENCE_S / 5)
    assert breaker.state is BreakerState.OPEN


def test_a_trial_that_had_no_time_leaves_room_for_the_next(clock):
    breaker = Breaker(clock, max_failures=1, cooldown_s=5)
    breaker.enter()
    breaker.failure()
    clock.now += 5
    assert breaker.enter()
    assert not breaker.enter()
    breaker.silence(PATIENCE_S / 5)
    assert breaker.enter()
    breaker.success()
    assert breaker.state is BreakerState.CLOSED
