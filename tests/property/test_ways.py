"""Computing, fetching, or both: the choice is right, and both is faster where neither is."""

from __future__ import annotations

from random import Random

import pytest

from paced_engine import PacedEngine, Speeds, numbers
from quire.manager import Way

TRIALS = 60


def draw(rng: Random) -> tuple[Speeds, int]:
    """Speeds that differ by up to thirty times, either way."""
    compute_s = 10 ** rng.uniform(-3.5, -1.5)
    fetch_s = compute_s * 10 ** rng.uniform(-1.5, 1.5)
    speeds = Speeds(
        compute_s=compute_s,
        fetch_s=fetch_s,
        load_s=fetch_s * rng.choice((0.01, 0.1, 0.3)),
        batch_s=compute_s * rng.choice((0.1, 0.5, 1.0)),
        chunk_pages=rng.choice((8, 16, 32)),
    )
    return speeds, rng.choice((32, 64, 128, 256))


def taken_s(speeds: Speeds, pages: int, way: Way | None) -> float:
    """Until the first token of a prompt that the store has."""
    engine = PacedEngine(speeds, pages=pages, way=Way.COMPUTE)
    prompt = numbers(pages, 1)
    engine.first_token_s(prompt)
    engine.forget()
    engine.manager.costs.force(way)
    return engine.first_token_s(prompt)[0]


def test_the_choice_is_right_in_nineteen_of_twenty_trials_c52() -> None:
    rng, wrong = Random(11), []
    for _ in range(TRIALS):
        speeds, pages = draw(rng)
        best = min(taken_s(speeds, pages, way) for way in Way)
        chosen = taken_s(speeds, pages, None)
        if chosen > 1.05 * best:
            wrong.append((speeds, pages, chosen / best))
    assert len(wrong) <= TRIALS // 20, wrong


@pytest.mark.parametrize("chunk_pages", [8, 16, 32])
@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.4])
def test_near_the_crossover_both_is_faster_by_a_third_c52(ratio: float, chunk_pages: int) -> None:
    speeds = Speeds(0.01, 0.01 * ratio, 0.0005, batch_s=0.002, chunk_pages=chunk_pages)
    alone = min(taken_s(speeds, 256, way) for way in (Way.COMPUTE, Way.FETCH))
    assert alone >= 1.3 * taken_s(speeds, 256, Way.BOTH)
    assert alone >= 1.3 * taken_s(speeds, 256, None)


@pytest.mark.parametrize("ratio", [0.5, 0.7, 1.0, 1.4, 2.0])
def test_so_it_is_on_an_accelerator_c52(ratio: float) -> None:
    """A prompt is one batch; a batch costs much whatever is in it, and is launched ahead."""
    speeds = Speeds(0.0015, 0.0015 * ratio, 0.0002, batch_s=0.015, chunk_pages=128, overlaps=True)
    alone = min(taken_s(speeds, 128, way) for way in (Way.COMPUTE, Way.FETCH))
    both = taken_s(speeds, 128, Way.BOTH)
    assert alone >= 1.2 * both
    assert taken_s(speeds, 128, None) <= 1.05 * both
