"""rank(): prefix against load, and why."""

import pytest

from quire.router.choose import REQUEST_TOKENS, By, Candidate, favoured, foreign_load, rank


@pytest.mark.parametrize(
    ("candidates", "best", "by"),
    [
        ([Candidate("a", 9)], "a", By.ONLY),
        ([Candidate("a", 1), Candidate("b", 0)], "b", By.LOAD),
        ([Candidate("a", 0, 0), Candidate("b", 0, 5)], "b", By.AFFINITY),
        ([Candidate("a", 0, 0), Candidate("b", 1000, 1001)], "b", By.AFFINITY),
        ([Candidate("a", 0, 0), Candidate("b", 1002, 1001)], "a", By.LOAD),
        ([Candidate("a", 0, 3), Candidate("b", 2, 3)], "a", By.LOAD),
        ([Candidate("a", 0, 3), Candidate("b", 2, 0)], "a", By.LOAD),
    ],
)
def test_a_token_more_to_do_weighs_as_much_as_one_less_of_the_prefix(candidates, best, by):
    for turn in range(len(candidates)):
        ranked = rank(candidates, 2000, turn=turn)
        assert (ranked.names[0], ranked.by) == (best, by)
        assert {*ranked.names} == {each.name for each in candidates}


def test_of_other_routers_requests_as_many_tokens_count_as_they_have_on_the_mean():
    assert foreign_load(0, 4, 16_000, 5000) == 0, "all are ours, and we know them better"
    assert foreign_load(4, 4, 0, 5000) == 4 * REQUEST_TOKENS + 5000
    assert foreign_load(1, 4, 0, 5000) == REQUEST_TOKENS + 1250
    assert foreign_load(2, 2, 0, 0) == 2 * REQUEST_TOKENS, "an older server says no tokens"
    assert foreign_load(1, 1, 16_000, 0) == REQUEST_TOKENS + 1000, "computed already"


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
    firsts = [rank(candidates, 0, turn).names[0] for turn in range(6)]
    assert firsts == ["a", "b", "c", "a", "b", "c"]
