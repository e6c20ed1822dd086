"""Trees of proposals, as numbers."""

from quire.engine.batch import Segment, verified
from quire.engine.branches import ancestors, cut, depths, joined, parents, placed, walk
from quire.engine.messages import SamplingParams
from quire.engine.sampling import Row, Sampled
from quire.types import NO_PAGES, RequestId


def test_a_chain_is_a_tree_without_branches() -> None:
    assert parents(3, 0) == [-1, 0, 1]
    assert depths(3, 0) == [1, 2, 3]
    assert ancestors(3, 0) == [[], [0], [0, 1]]
    assert cut([5, 6, 7], 0, 2) == [5, 6]


def test_branches_stand_beside_the_trunk() -> None:
    # trunk 0 1 2; beside 0: 3 4; beside 1: 5 6; beside 2: 7 8
    assert parents(9, 2) == [-1, 0, 1, -1, -1, 0, 0, 1, 1]
    assert depths(9, 2) == [1, 2, 3, 1, 1, 2, 2, 3, 3]
    assert ancestors(9, 2)[7] == [0, 1]


def test_a_tree_is_cut_at_a_depth() -> None:
    tree = joined([1, 2, 3], [[10], [20], [30]])
    assert tree == [1, 2, 3, 10, 20, 30]
    assert cut(tree, 1, 2) == [1, 2, 10, 20]
    assert cut(tree, 1, 0) == []
    assert cut(tree, 1, 9) == tree


def test_a_walk_ends_where_nothing_proposed_was_drawn() -> None:
    tree = joined([1, 2, 3], [[10], [20], [30]])
    #             before 1  2  3  10 20 30
    assert walk(tree, 1, [9, 2, 3, 4, 0, 0, 0]) == []
    assert walk(tree, 1, [1, 2, 3, 4, 0, 0, 0]) == [0, 1, 2]
    assert walk(tree, 1, [10, 2, 3, 4, 2, 0, 0]) == [3]  # nothing comes after a branch
    assert walk(tree, 1, [1, 20, 3, 4, 0, 3, 0]) == [0, 4]
    assert placed(tree, 1, [1, 20]) == [0, 4]


def test_what_was_drawn_after_a_branch_counts() -> None:
    tree = joined([1, 2], [[10], [20]])
    tokens = b"".join(token.to_bytes(4, "little") for token in [7, *tree])
    row = Row(SamplingParams(max_tokens=9), 0)
    segment = Segment(RequestId("r"), tokens, 0, NO_PAGES, [], row, drafts=4, branches=1)
    drawn = [Sampled(token=token) for token in (1, 20, 3, 4, 5)]
    result = verified(segment, drawn)
    assert result.sampled == drawn[0]
    assert result.further == [drawn[1], drawn[4]]
    drawn[1] = Sampled(token=20, error="not a number")
    assert verified(segment, drawn).further == [drawn[1]]
