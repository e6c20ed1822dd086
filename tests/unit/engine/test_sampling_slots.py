"""Samplers between draws: whose slot is whose, and histories that come a token late."""

import numpy as np
import pytest
import torch

from quire.engine.messages import SamplingParams
from quire.engine.sampling import Row, open_sampler, sample
from quire.engine.sampling.slots import Slots

PENALISED = SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=5.0)


def pack(*tokens):
    return np.array(tokens, "<i4").tobytes()


def test_a_request_keeps_its_slot_until_it_is_dropped():
    slots = Slots(2)
    first = slots.take("a", {"a"})
    first.position = 3
    assert slots.take("b", {"b"}).number != first.number
    assert slots.take("a", {"a"}) is first
    slots.drop("a")
    again = slots.take("a", {"a"})
    assert again.position is None


def test_the_one_drawn_for_longest_ago_gives_way():
    slots = Slots(2)
    a, b = slots.take("a", {"a"}), slots.take("b", {"b"})
    slots.take("a", {"a"})
    assert slots.take("c", {"c"}).number == b.number
    assert slots.take("a", {"a"}) is a


def test_nobody_of_the_batch_gives_way():
    slots = Slots(2)
    slots.take("a", {"a"})
    b = slots.take("b", {"b"})
    batch = {"c", "a"}
    assert slots.take("c", batch).number == b.number


def test_dropping_a_stranger_changes_nothing():
    slots = Slots(1)
    slots.drop("x")
    slots.take("a", {"a"})
    slots.take("b", {"b"})


@pytest.fixture
def sampler():
    return open_sampler(torch.device("cpu"), 8, 4)


def test_on_the_host_the_last_token_may_be_missing(sampler):
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    tokens = []
    for position in range(3):
        late = pack(*tokens[:-1])
        drawn = sampler.draw(logits, [Row(PENALISED, position, pack(9), late)], ["r"])
        assert drawn.collect() == sample(logits, [Row(PENALISED, position, pack(9), pack(*tokens))])
        tokens.append(int(drawn.tokens[0]))
    assert tokens == [0, 1, 2]


def test_a_token_drawn_again_is_the_one_that_counts(sampler):
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    for given in (logits, logits.flip(1)):  # the first time its pages turned out to be lost
        sampler.draw(given, [Row(PENALISED, 0)], ["r"])
    drawn = sampler.draw(logits.flip(1), [Row(PENALISED, 1)], ["r"])
    assert drawn.collect()[0].token == 2


def test_nothing_is_kept_of_requests_that_are_gone(sampler):
    """A server draws for millions; nobody tells it which of them have ended."""
    logits = torch.tensor([[3.0, 2.0]])
    for number in range(100):
        drawn = sampler.draw(logits, [Row(PENALISED, 0)], [f"r{number}"])
        assert drawn.collect()[0].token == 0
    assert list(sampler._last) == ["r99"]
