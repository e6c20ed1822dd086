"""NgramDraft proposes what a search through the whole text would find."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.draft.ngram import NgramDraft


def searched(text, count, longest=4, shortest=2):
    """The same by going through the text."""
    for size in range(min(longest, len(text)), shortest - 1, -1):
        last = text[len(text) - size :]
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == last:
                going_on = list(text)
                for number in range(count):
                    going_on.append(going_on[end + number])
                return going_on[len(text) :]
    return []


TEXT = st.lists(st.integers(0, 3), max_size=60)


@settings(max_examples=300, deadline=None)
@given(TEXT, st.lists(TEXT, max_size=6), st.integers(1, 8))
def test_it_proposes_what_a_search_finds(prompt, more, count):
    draft, text = NgramDraft(prompt), list(prompt)
    assert draft.propose(count) == searched(text, count)
    for tokens in more:
        draft.extend(tokens)
        text += tokens
        assert len(draft) == len(text)
        assert draft.propose(count) == searched(text, count)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3))
def test_it_does_so_with_a_long_prompt_and_one_token_at_a_time(seed, shortest, more):
    chance = np.random.default_rng(seed)
    text = chance.integers(0, 30, 1500, np.int32)
    longest = shortest + more
    draft = NgramDraft(text[:700], longest=longest, shortest=shortest)
    for end in range(700, 1500):
        draft.extend([int(text[end])])
        if end % 37 == 0:
            before = text[: end + 1].tolist()
            assert draft.propose(5) == searched(before, 5, longest, shortest)


def test_where_a_text_comes_in_pieces_makes_no_difference():
    chance = np.random.default_rng(1)
    text = chance.integers(0, 6, 5000, np.int32)
    whole, pieces = NgramDraft(text), NgramDraft()
    at = 0
    while at < len(text):
        size = int(chance.integers(0, 900))
        pieces.extend(text[at : at + size])
        at += size
    for token in [1, 2, 3, 1, 5]:
        assert whole.propose(7) == pieces.propose(7)
        whole.extend([token])
        pieces.extend([token])


def test_what_was_entered_stays_when_the_bound_is_reached():
    draft = NgramDraft(max_tokens=8)
    draft.extend([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 9, 10])
    assert draft.propose(2) == []  # 9, 10 stands behind the bound
    draft.extend([1, 2, 3])
    assert draft.propose(2) == [4, 5]


@pytest.mark.parametrize("prompt", [[], [7], [7, 7]])
def test_a_short_text_proposes_nothing_wrong(prompt):
    assert NgramDraft(prompt).propose(3) == searched(prompt, 3)
    assert NgramDraft(prompt).propose(0) == []
