"""Sampling: against naive references, against the distributions themselves, and at the edges."""

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.messages import SamplingParams
from quire.engine.sampling import Row, Sampled, needs_history, on_host, sample, uniform
from sampling_cases import check_held_rows

DRAWS = 4000


class OnHost:
    """Draws that the host checks against itself."""

    vocab_size, dtype = 3000, torch.float32

    def check(self, logits, rows):
        """A held row draws as if the other logits were not there; its log probabilities are those
        of the raw logits."""
        for i, row in enumerate(rows):
            may = np.unpackbits(np.frombuffer(row.allowed, np.uint8), bitorder="little")
            masked = logits[i].clone()
            if row.allowed:
                masked[~torch.from_numpy(may[: len(masked)].astype(bool))] = -math.inf
            (one,) = sample(logits[i : i + 1], [row])
            (other,) = sample(masked[None], [msgspec.structs.replace(row, allowed=b"")])
            assert (one.token, one.error) == (other.token, other.error)
            if one.logprobs is not None:
                (raw,) = sample(logits[i : i + 1], [msgspec.structs.replace(row, allowed=b"")])
                assert one.logprobs.top_logprobs == raw.logprobs.top_logprobs


@pytest.mark.parametrize("seed", range(3))
def test_what_a_grammar_allows(seed):
    check_held_rows(OnHost(), num_rows=25, seed=seed)


def row(position=0, prompt=(), output=(), **params):
    return Row(
        SamplingParams(max_tokens=1, **params),
        position,
        np.array(prompt, "<i4").tobytes(),
        np.array(output, "<i4").tobytes(),
    )


def draw(logits, position=0, **params):
    """One token for one row of logits."""
    (sampled,) = sample(torch.as_tensor(logits)[None], [row(position, **params)])
    assert not sampled.error
    return sampled.token


def draws(logits, count=DRAWS, **params):
    """How often each token is drawn, over positions 0..count."""
    logits = torch.as_tensor(logits)
    tokens: Counter[int] = Counter()
    for first in range(0, count, 500):
        rows = [row(position, **params) for position in range(first, min(count, first + 500))]
        tokens.update(s.token for s in sample(logits.expand(len(rows), -1), rows))
    return tokens


def softmax(logits):
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


def assert_distributed(counts, expected):
    """Chi-square at six sigma: with fixed seeds it holds or it does not."""
    total = sum(counts.values())
    assert set(counts) <= set(np.flatnonzero(expected))
    often = [token for token in np.flatnonzero(expected) if expected[token] * total >= 5]
    chi = sum((counts[t] - expected[t] * total) ** 2 / (expected[t] * total) for t in often)
    freedom = max(1, len(often) - 1)
    assert chi < freedom + 6 * math.sqrt(2 * freedom)


def naive(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution, step by step, over whole vectors."""
    probabilities = softmax(np.asarray(logits, np.float64) / temperature)
    order = np.lexsort((np.arange(len(logits)), -probabilities))
    keep = list(order[: top_k or len(order)])
    total = probabilities[keep].sum()
    if top_p < 1:
        before = 0.0
        kept = []
        for token in keep:
            if kept and before >= top_p * total:
                break
            kept.append(token)
            before += probabilities[token]
        keep = kept
    keep = [t for t in keep if probabilities[t] >= min_p * probabilities[order[0]]]
    result = np.zeros(len(logits))
    result[keep] = probabilities[keep] / probabilities[keep].sum()
    return result


def naive_adjusted(logits, row):
    params = row.params
    adjusted = np.array(logits.tolist())
    prompt, output = (np.frombuffer(ids, "<i4").tolist() for ids in (row.prompt, row.output))
    for token, bias in params.logit_bias.items():
        adjusted[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        adjusted[token] = (
            adjusted[token] / factor if adjusted[token] > 0 else adjusted[token] * factor
        )
    for token, times in Counter(output).items():
        adjusted[token] -= params.presence_penalty + params.frequency_penalty * times
    return adjusted


def random_logits(seed, size=40, scale=2.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, size).astype(np.float32))


# ---- greedy --------------------------------------------------------------------------------------


def test_greedy_takes_the_likeliest():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 2.9]])
    assert [s.token for s in sample(logits, [row(temperature=0), row(temperature=0)])] == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [3, 1000, 50_000])
def test_of_equals_greedy_takes_the_lowest_id(dtype, size):
    logits = torch.zeros(4, size, dtype=dtype)
    logits[1, 1:] = 5
    logits[2, size // 2] = logits[2, size - 1] = 7
    logits[3, :] = -math.inf
    logits[3, 2] = -100
    tokens = [s.token for s in sample(logits, [row(temperature=0)] * 4)]
    assert tokens == [0, 1, size // 2, 2]


def test_a_tiny_temperature_is_greedy():
    logits = random_logits(0)
    assert draw(logits, temperature=1e-6) == draw(logits, temperature=0) == int(logits.argmax())
    assert draw(logits, temperature=1e-4) == int(logits.argmax())


def test_filters_do_not_change_greedy():
    logits = random_logits(1)
    assert draw(logits, temperature=0, top_k=3, top_p=0.1, min_p=0.9) == int(logits.argmax())


# ---- filters and distributions -------------------------------------------------------------------

FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_follow_the_distribution(params):
    logits = random_logits(2)
    assert_distributed(draws(logits, seed=7, **params), naive(logits, **params))


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_long_vocabulary_is_drawn_from_as_a_short_one(params):
    """More tokens than the head holds, with the mass in it, beyond it, or half and half."""
    for scale in (0.01, 1.0, 4.0):
        logits = random_logits(3, size=3000, scale=scale)
        expected = naive(logits, **params)
        order = np.argsort(-expected, kind="stable")
        cumulative = np.cumsum(expected[order])
        for position in range(20):
            token = draw(logits, position, seed=5, **params)
            place = int(np.flatnonzero(order == token)[0])
            u = uniform(5, position)
            low, high = cumulative[place] - expected[token], cumulative[place]
            assert low - 1e-9 <= u <= high + 1e-9
            assert expected[token] > 0


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.integers(-8, 8), min_size=1, max_size=30),
    params=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.3, 1.0, 2.0]),
            "top_k": st.integers(0, 35),
            "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.77, 0.9, 0.999, 1.0]),
            "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        }
    ),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_only_what_the_filters_leave_is_drawn(values, params, seed):
    logits = np.array(values, np.float32) / 2
    # A whisker wider: whether a cumulative sum reaches top_p exactly is up to rounding.
    wider = params | {
        "top_p": min(1.0, params["top_p"] + 1e-9),
        "min_p": params["min_p"] * (1 - 1e-9),
    }
    expected = naive(logits, **wider)
    for position in range(5):
        assert expected[draw(logits, position, seed=seed, **params)] > 0


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    assert set(draws(logits, top_p=0.49)) == {0}
    assert set(draws(logits, top_p=0.6)) == {0, 1}
    assert set(draws(logits, top_p=0.8)) == {0, 1, 2}
    assert set(draws(logits, top_p=0.99)) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left():
    logits = np.log([0.4, 0.2, 0.2, 0.2])
    assert set(draws(logits, top_k=2, top_p=0.6)) == {0}  # 0.4 of 0.6 is two thirds


def test_top_k_of_equals_keeps_the_lowest_ids():
    assert set(draws(torch.zeros(50), 100, top_k=3)) == {0, 1, 2}
    assert set(draws(torch.zeros(3000), 100, top_k=3)) == {0, 1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 100, 2999, 3000, 5000])
def test_an_accelerator_finds_the_same_heads_as_the_host(dtype, size):
    logits = torch.stack([random_logits(seed, size=3000) for seed in range(4)]).to(dtype)
    logits[1, :] = 0
    logits[2, :1500] = -math.inf
    temperatures = [1.0, 0.5, 2.0, 0.1]
    there = on_host._heads_on_device(logits, temperatures, size)
    here = on_host._heads(logits, range(4), temperatures, size)
    for one, other in zip(there, here, strict=True):
        assert one.complete == other.complete
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logits.tolist() == other.logits.tolist()
        assert one.total == pytest.approx(other.total, rel=1e-14)


def test_the_order_is_that_of_a_stable_sort():
    rng = np.random.default_rng(0)
    values = rng.normal(0, 2, 5000).round(1).astype(np.float32)
    values[:6] = [-math.inf, 0.0, -0.0, 3e38, -3e38, 1e-40]
    expected = np.lexsort((np.arange(5000), -values))
    assert on_host._by_falling_value(values).tolist() == expected.tolist()


# ---- the draw ------------------------------------------------------------------------------------


def test_uniform_numbers_are_uniform_and_their_own():
    numbers = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert all(0 <= u < 1 for u in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.02
    assert_distributed(Counter(int(u * 20) for u in numbers), np.full(20, 1 / 20))


def test_the_draw_is_pinned():
    """Changing it changes every seeded answer there ever was."""
    assert uniform(0, 0) == 0.9842183906521498
    assert [draw(random_logits(4), position, seed=11) for position in range(6)] == [
        28,
        7,
        33,
        15,
        15,
        2,
    ]


def mixed_rows(rng, count, vocab_size):
    return [
        row(
            position=i % 7,
            seed=i % 5,
            temperature=float(rng.choice([0, 0.7, 1.0, 1.9])),
            top_k=int(rng.choice([0, 2, 50, 2000])),
            top_p=float(rng.choice([0.5, 0.95, 1.0])),
            logprobs=int(rng.integers(0, 4)) if i % 3 == 0 else None,
            repetition_penalty=1.2 if i % 4 == 0 else 1.0,
            output=rng.integers(0, vocab_size, 50),
        )
        for i in range(count)
    ]


def test_a_token_does_not_depend_on_the_rest_of_the_batch():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (70, 3000)).astype(np.float32))
    rows = mixed_rows(rng, 70, 3000)
    together = sample(logits, rows)
    for i in rng.permutation(70):
        assert sample(logits[i : i + 1], [rows[i]]) == [together[i]]
    order = rng.permutation(70)
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_the_device(dtype):
    """In bfloat16 most logits have equals, also among the greedy rows' maxima."""
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(0, 3, (130, 50_000)).astype(np.float32)).to(dtype)
    rows = mixed_rows(rng, 130, 50_000)
    here, there = sample(logits, rows), sample(logits.cuda(), rows)
    assert [s.token for s in there] == [s.token for s in here]
    asked = [(a.logprobs, b.logprobs) for a, b in zip(here, there, strict=True) if a.logprobs]
    for one, other in asked:
        assert one.top_ids == other.top_ids
        assert one.top_logprobs == pytest.approx(other.top_logprobs)


def test_each_token_has_the_interval_from_its_lower_end_on(monkeypatch):
    logits = [0.0] * 4 + [-math.inf] * 3
    for u, token in [(0.0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.75, 3), (1 - 2.0**-53, 3)]:
        monkeypatch.setattr(on_host, "uniform", lambda seed, position, u=u: u)
        assert draw(logits) == token


def test_seed_and_position_decide():
    logits = torch.zeros(1000)
    base = [draw(logits, position, seed=1) for position in range(20)]
    assert base == [draw(logits, position, seed=1) for position in range(20)]
    assert base != [draw(logits, position, seed=2) for position in range(20)]
    assert len(set(base)) > 15


# ---- biases and penalties ------------------------------------------------------------------------


def test_which_parameters_need_histories():
    assert not needs_history(SamplingParams(max_tokens=1, logit_bias={3: 1.0}))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert needs_history(SamplingParams(max_tokens=1, **{name: 0.5}))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    repetition=st.sampled_from([0.8, 1.0, 1.3]),
    presence=st.sampled_from([-2.0, 0.0, 1.5]),
    frequency=st.sampled_from([-0.5, 0.0, 0.7]),
    bias=st.dictionaries(
        st.integers(0, 11), st.sampled_from([-100.0, -1.0, 0.5, 100.0]), max_size=4
    ),
)
def test_penalties_are_those_of_the_reference(seed, repetition, presence, frequency, bias):
    rng = np.random.default_rng(seed)
    rows = [
        row(
            temperature=0,
            prompt=rng.integers(0, 12, 5),
            output=rng.integers(0, 12, 6),
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias=bias,
        ),
        row(temperature=0),
    ]
    logits = torch.from_numpy(rng.normal(0, 2, (2, 12)).astype(np.float32))
    before = logits.clone()
    first, second = sample(logits, rows)
    adjusted = naive_adjusted(logits[0], rows[0])
    assert adjusted[first.token] == pytest.approx(adjusted.max(), abs=1e-4)
    assert second.token == int(logits[1].argmax())
    assert torch.equal(logits, before)


def test_penalties_count_in_draws_too():
    logits = random_logits(5, size=10)
    penalised = row(prompt=[0, 1], output=[2, 2, 3], repetition_penalty=1.3, frequency_penalty=0.4)
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
    counts = Counter(
        sample(logits[None], [row(p, prompt=[0, 1], output=[2, 2, 3], **params)])[0].token
        for p in range(DRAWS)
    )
    assert_distributed(counts, naive(naive_adjusted(logits, penalised)))


def test_presence_and_frequency_look_at_the_output_only():
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    params = {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    assert sample(logits, [row(prompt=[0, 0, 0], **params)])[0].token == 0
    assert sample(logits, [row(output=[0], **params)])[0].token == 1


def test_a_bias_can_ban_and_force():
    logits = random_logits(6)
    best = int(logits.argmax())
    assert best not in draws(logits, 500, logit_bias={best: -100.0})
    assert set(draws(logits, 200, logit_bias={17: 100.0})) == {17}
    assert draw(logits, temperature=0, logit_bias={best: -math.inf}) != best


def test_ids_outside_the_vocabulary_are_passed_over():
    strange = row(
        temperature=0, logit_bias={-1: 9.0, 3: 9.0}, output=[-5, 99], repetition_penalty=1.5
    )
    assert sample(torch.tensor([[0.0, 1.0, 0.0]]), [strange])[0].token == 1


# ---- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_fail_their_row_only(bad, temperature):
    logits = torch.stack([random_logits(7)] * 3)
    logits[1, 20] = bad
    results = sample(logits, [row(temperature=temperature, logprobs=2, seed=3)] * 3)
    assert "not finite" in results[1].error
    assert results[0] == results[2]
    assert not results[0].error
    (alone,) = sample(logits[:1], [row(temperature=temperature, logprobs=2, seed=3)])
    assert alone.token == results[0].token


def test_a_row_with_nothing_left_is_an_error():
    (nothing,) = sample(torch.full((1, 5), -math.inf), [row()])
    assert nothing.error


@pytest.mark.parametrize("size", [6, 2000])
def test_what_cannot_be_drawn_is_none_of_the_likeliest(size):
    logits = torch.full((1, size), -math.inf)
    logits[0, [3, 5]] = torch.tensor([1.0, 2.0])
    for temperature in (0.0, 1.0):
        (found,) = sample(logits, [row(temperature=temperature, logprobs=5)])
        assert found.logprobs.top_ids == [5, 3]
        assert len(found.logprobs.top_logprobs) == 2


def test_masked_tokens_are_never_drawn():
    logits = torch.full((2000,), -math.inf)
    logits[[3, 1500]] = torch.tensor([0.0, 0.0])
    for params in ({}, {"top_k": 100}, {"top_p": 0.999}, {"temperature": 2.0}):
        assert set(draws(logits, 300, **params)) == {3, 1500}


@pytest.mark.parametrize("size", [1, 2, 5000])
def test_all_equal_logits_are_all_drawn(size):
    for value in (0.0, -50.0, 1e30):
        drawn = draws(torch.full((size,), value), 400)
        assert len(drawn) >= min(size, 300)


def test_huge_logits_neither_overflow_nor_flatten():
    logits = torch.tensor([3e38, 1e38, -3e38])
    assert set(draws(logits, 100)) == {0}
    assert set(draws(logits, 100, temperature=2.0)) == {0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_will_do(dtype):
    logits = random_logits(8, size=1100, scale=4.0).to(dtype)
    counts = draws(logits, 1500, seed=1)
    assert_distributed(counts, naive(logits.double().numpy()))


def test_no_rows_no_tokens():
    assert sample(torch.zeros(0, 10), []) == []


# ---- log probabilities ---------------------------------------------------------------------------


def test_log_probabilities_are_of_the_raw_logits():
    logits = random_logits(9, size=3000)
    expected = np.log(softmax(logits.double().numpy()))
    asked = row(temperature=0.5, top_k=3, seed=2, logprobs=4, logit_bias={int(logits.argmin()): 99})
    (sampled,) = sample(logits[None], [asked])
    assert sampled.token == int(logits.argmin())
    found = sampled.logprobs
    assert found.logprob == pytest.approx(expected[sampled.token])
    assert found.top_ids == np.argsort(-expected, kind="stable")[:4].tolist()
    assert found.top_logprobs == pytest.approx(expected[found.top_ids].tolist())


def test_zero_asks_for_the_sampled_token_only():
    (sampled,) = sample(torch.zeros(1, 4), [row(logprobs=0)])
    assert sampled.logprobs.top_ids == []
    assert sampled.logprobs.logprob == pytest.approx(math.log(0.25))


def test_of_equals_the_lowest_ids_are_listed():
    logits = torch.zeros(1, 5000)
    logits[0, 4000] = 1
    (sampled,) = sample(logits, [row(temperature=0, logprobs=3)])
    assert sampled.logprobs.top_ids == [4000, 0, 1]


def test_more_than_the_vocabulary_lists_the_vocabulary():
    (sampled,) = sample(torch.tensor([[0.0, 1.0]]), [row(temperature=0, logprobs=5)])
    assert sampled.logprobs.top_ids == [1, 0]


def test_those_who_do_not_ask_get_none():
    results = sample(torch.zeros(2, 4), [row(), row(logprobs=1)])
    assert results[0].logprobs is None
    assert results[1].logprobs is not None


# ---- messages ------------------------------------------------------------------------------------


def test_rows_and_results_travel():
    asked = row(3, prompt=[1, 2], output=[3], logit_bias={5: 1.0}, logprobs=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=Row) == asked
    (sampled,) = sample(torch.zeros(1, 4), [asked])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampled), type=Sampled) == sampled
