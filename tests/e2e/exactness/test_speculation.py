"""C32 with tokens proposed ahead: the same greedy tokens, by n-gram and by a head, chains and
trees, in every tier, chunk size and batch, under eviction and preemption."""

from pathlib import Path

import pytest

from e2e.exactness import scenarios
from e2e.exactness.rig import WHOLE
from e2e.exactness.subjects import DENSE_SUBJECTS, TINY_LLAMA, Subject
from eagle_models import teacher_of, write_head
from quire.config import WritePolicy

SUBJECTS = [s for s in DENSE_SUBJECTS if s.name in ("dense_llama", "dense_gemma3")]


@pytest.fixture(
    params=[
        *((s, way) for s in SUBJECTS for way in ("ngram", "eagle")),
        *((s, "eagle-tree") for s in SUBJECTS if "window" not in s.components),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def subject(request, tmp_path: Path) -> Subject:
    plain, way = request.param
    if way != "ngram":
        way = f"{way}:{write_head(teacher_of(plain.find()), tmp_path / 'head')}"
    speculating: Subject = plain.under(speculate=way, draft_tokens=3)
    return speculating


def test_every_tier_gives_the_same_tokens_c32(subject: Subject, store: str) -> None:
    scenarios.every_tier(subject, store)


@pytest.mark.parametrize("chunk_tokens", [16, WHOLE])
def test_chunk_sizes_and_mixed_batches_c32(subject: Subject, chunk_tokens: int) -> None:
    scenarios.chunks_and_mixed_batches(subject, subject.ask(), chunk_tokens)


def test_under_eviction_c32(subject: Subject, store: str) -> None:
    scenarios.eviction(subject, store, WritePolicy.WRITE_THROUGH)


def test_more_than_the_host_holds_c12_c13_c32(subject: Subject, store: str) -> None:
    scenarios.more_than_the_host_holds(subject, store)


def test_a_conversation_c32(subject: Subject, store: str) -> None:
    scenarios.conversation(subject, store, 3)


def test_branches_c32(subject: Subject) -> None:
    if dict(subject.options)["speculate"] != "ngram":
        pytest.skip("the last pair before a branch is another: a page less than this asks for")
    scenarios.branches(subject)


@pytest.mark.long
def test_two_ranks_c32(store: str) -> None:
    scenarios.two_ranks(TINY_LLAMA.under(speculate="ngram", draft_tokens=3), store)
