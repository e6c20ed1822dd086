"""rank(): prefix against load, and why."""

import pytest

from quire.router.choose import By, Candidate, rank


@pytest.mark.parametrize(
    ("candidates", "best", "by"),
    [
        ([Candidate("a", 9)], "a", By.ONLY),
        ([Candidate("a", 1), Candidate("b", 0)], "b", By.LOAD),
        ([Candidate("a", 0, 0), Candidate("b", 0, 5)], "b", By.AFFINITY),
        ([Candidate("a", 0, 0), Candidate("b", 1, 65)], "b", By.AFFINITY),
        ([Candidate("a", 0, 0), Candidate("b", 2, 65)], "a", By.LOAD),
        ([Candidate("a", 0, 3), Candidate("b", 2, 3)], "a", By.LOAD),
        ([Candidate("a", 0, 3), Candidate("b", 2, 0)], "a", By.LOAD),
    ],
)
def test_a_request_more_weighs_as_much_as_so_many_pages(candidates, best, by):
    for turn in range(len(candidates)):
        ranked = rank(candidates, 100, load_pages=64, turn=turn)
        assert (ranked.names[0], ranked.by) == (best, by)
        assert {*ranked.names} == {each.name for each in candidates}


def test_equals_take_turns():
    candidates = [Candidate(name, 2) for name in "abc"]
    firsts = [rank(candidates, 0, 64, turn).names[0] for turn in range(6)]
    assert firsts == ["a", "b", "c", "a", "b", "c"]
