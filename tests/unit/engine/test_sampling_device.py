"""The kernels that draw, in Triton's interpreter, with small vocabularies."""

import pytest
import torch

from kernel_cases import interpreted
from quire.engine.messages import SamplingParams
from quire.engine.sampling import Row
from quire.types import RequestId
from sampling_cases import (
    KINDS,
    Place,
    check_extremes,
    check_greedy,
    check_held_rows,
    check_histories,
    check_late_restart,
    check_many_logprobs,
    check_random_rows,
    check_reused_id,
    check_strange_rows,
    check_tails_without_weight,
)

pytestmark = interpreted

SMALL = Place("cpu", vocab_size=150, block=64)
"""Three places per lane: lists and registers both have their part."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_draws_the_same(kind):
    check_random_rows(SMALL, kind, num_rows=4, seed=1)


@pytest.mark.parametrize("kind", ["equals", "masked"])
def test_greedy_batches(kind):
    check_greedy(SMALL, kind, num_rows=8)


def test_what_a_grammar_allows():
    check_held_rows(SMALL, num_rows=5, seed=0)


def test_filters_that_keep_everything():
    check_tails_without_weight(SMALL)


def test_log_probabilities():
    check_many_logprobs(SMALL)


def test_one_block_is_enough_for_a_short_vocabulary():
    check_random_rows(Place("cpu", vocab_size=50, block=64), "equals", num_rows=4, seed=2)


def test_a_long_vocabulary_goes_through_lists():
    check_random_rows(Place("cpu", vocab_size=1000, block=32), "broad", num_rows=2, seed=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    check_random_rows(Place("cpu", 150, 64, dtype), "broad", num_rows=3, seed=4)


def test_intervals_begin_with_their_lower_end(monkeypatch):
    check_extremes(SMALL, monkeypatch)


def test_logits_that_are_not_numbers_fail_their_row_only():
    check_strange_rows(SMALL)


def test_histories_stay_on_the_device():
    check_histories(Place("cpu", vocab_size=40, block=64), num_steps=12, max_rows=3, seed=5)


def test_a_history_is_filled_again_without_its_last_token():
    check_late_restart(Place("cpu", vocab_size=40, block=64))


def test_another_request_of_the_same_name_has_biases_of_its_own():
    check_reused_id(Place("cpu", vocab_size=40, block=64))


def test_warming_up_leaves_nothing_behind():
    sampler = Place("cpu", vocab_size=40, block=64).sampler(1)
    sampler.warm_up(torch.float32)
    row = Row(SamplingParams(max_tokens=1, temperature=0.0, frequency_penalty=3.0), 0)
    assert sampler.draw(torch.zeros(1, 40), [row], [RequestId("")]).collect()[0].token == 0
