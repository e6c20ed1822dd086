"""Drawing on a real device: what the host draws, at real sizes, without ever waiting."""

import importlib.util

import numpy as np
import pytest
import torch

from quire.engine.sampling import Row, open_sampler
from quire.engine.sampling.on_host import HostSampler
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
    check_strange_rows,
    check_tails_without_weight,
    pack,
    random_edits,
    random_logits,
    random_params,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

LARGE = Place("cuda", vocab_size=151_936, block=2048)
HALF = Place("cuda", 151_936, 2048, torch.bfloat16)
"""Most logits have equals."""
ODD = Place("cuda", vocab_size=50_257, block=2048)


@pytest.mark.parametrize("place", [LARGE, HALF, ODD], ids=["float32", "bfloat16", "odd"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_the_host_draws_the_same(place, kind, seed):
    check_random_rows(place, kind, num_rows=32, seed=seed)


@pytest.mark.parametrize("place", [LARGE, HALF], ids=["float32", "bfloat16"])
def test_edges(place, monkeypatch):
    check_strange_rows(place)
    check_extremes(place, monkeypatch)
    check_many_logprobs(place)
    check_tails_without_weight(place)
    for kind in KINDS:
        check_greedy(place, kind, num_rows=9)


@pytest.mark.parametrize("place", [LARGE, HALF, ODD], ids=["float32", "bfloat16", "odd"])
def test_what_a_grammar_allows(place):
    check_held_rows(place, num_rows=25, seed=1)


@pytest.mark.parametrize("seed", range(3))
def test_histories_stay_on_the_device(seed):
    check_histories(Place("cuda", 3000, 2048), num_steps=60, max_rows=16, seed=seed)
    check_histories(HALF, num_steps=12, max_rows=8, seed=seed)
    check_late_restart(HALF)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_draw_never_waits_for_the_device():
    rng = np.random.default_rng(0)
    sampler = open_sampler(torch.device("cuda"), HALF.vocab_size, 8)
    assert not isinstance(sampler, HostSampler)
    logits = torch.stack([random_logits(rng, "broad", HALF.vocab_size) for _ in range(8)])
    logits = logits.to("cuda", torch.bfloat16)
    for temperature in (0.0, 1.0):
        for step in range(4):
            rows = [
                Row(
                    random_params(rng, temperature=temperature, **random_edits(rng, 1000)),
                    step,
                    pack([1, 2]),
                    pack([3] * step),
                )
                for _ in range(8)
            ]
            ids = [f"{temperature} {i} {step % 3}" for i in range(8)]
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first compiles
            try:
                drawn = sampler.draw(logits, rows, ids)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert len(drawn.collect()) == 8


def test_draws_do_not_depend_on_the_batch_or_the_run():
    rng = np.random.default_rng(1)
    sampler = open_sampler(torch.device("cuda"), HALF.vocab_size, 64)
    logits = torch.stack([random_logits(rng, "flat", HALF.vocab_size) for _ in range(64)]).cuda()
    rows = [Row(random_params(rng, temperature=1.3), i) for i in range(64)]
    ids = [str(i) for i in range(64)]
    together = sampler.draw(logits, rows, ids).collect()
    assert sampler.draw(logits, rows, ids).collect() == together
    order = rng.permutation(64).tolist()
    mixed = sampler.draw(logits[order], [rows[i] for i in order], ids).collect()
    assert mixed == [together[i] for i in order]


def test_every_search_ends():
    """Counts that carried a fraction of mass once let one search in thousands go on for ever."""
    rng = np.random.default_rng(2)
    sampler = open_sampler(torch.device("cuda"), HALF.vocab_size, 64)
    logits = torch.stack([random_logits(rng, "broad", HALF.vocab_size) for _ in range(64)])
    logits = logits.to("cuda", torch.bfloat16)
    params = [random_params(rng, temperature=1.0, top_p=0.9, top_k=0, seed=i) for i in range(64)]
    ids = [str(i) for i in range(64)]
    drawn = [sampler.draw(logits, [Row(p, step) for p in params], ids) for step in range(200)]
    assert all(not s.error for d in drawn for s in d.collect())
