"""Text for prompts: seeded, of the length asked for, and no passage beginning like another."""

import pytest

from quire.bench.prose import Prose


def test_the_same_seed_gives_the_same_passages():
    one, again, other = Prose(1), Prose(1), Prose(2)
    passages = [one.passage(300) for _ in range(3)]
    assert passages == [again.passage(300) for _ in range(3)]
    assert passages[0] != other.passage(300)


def test_no_passage_begins_like_another():
    prose, other = Prose(1), Prose(2)
    starts = {text[:16] for _ in range(50) for text in (prose.passage(200), other.passage(200))}
    assert len(starts) == 100


@pytest.mark.parametrize("length", [40, 1000, 5000])
def test_a_passage_is_as_long_as_asked_for(length):
    assert len(Prose(3).passage(length)) == length
