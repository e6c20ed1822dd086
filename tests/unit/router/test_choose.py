"""rank(): prefix against load, and why."""

import pytest

from quire.router.choose import By, Candidate, favoured, rank


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


def test_a_key_has_its_server_also_when_another_comes():
    names = [f"http://10.0.0.{i}:8000" for i in range(8)]
    homes = {f"user {i}": favoured(names, f"user {i}") for i in range(400)}
    assert {*homes.values()} == {*names}
    more = [*names, "http://10.0.0.9:8000"]
    moved = [key for key, home in homes.items() if favoured(more, key) != home]
    assert len(moved) < 100, "about one in nine"
    assert all(favoured(more, key) == more[-1] for key in moved)


def test_equals_take_turns():
    candidates = [Candidate(name, 2) for name in "abc"]
    firsts = [rank(candidates, 0, 64, turn).names[0] for turn in range(6)]
    assert firsts == ["a", "b", "c", "a", "b", "c"]
