"""C32 on CUDA in float32: the scenarios of the CPU, exactly, for every architecture.

With graphs unless it says otherwise. What is tampered with must be noticed here too.
"""

import pytest
import torch

from e2e.exactness import scenarios
from e2e.exactness.rig import WHOLE
from e2e.exactness.subjects import DENSE_SUBJECTS, TINY_SUBJECTS, Subject
from quire.config import WritePolicy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
OURS = [subject.under(device="cuda") for subject in DENSE_SUBJECTS]
OTHERS = [subject.under(device="cuda") for subject in TINY_SUBJECTS]
EAGER = [subject.under(device="cuda", cuda_graphs=False) for subject in DENSE_SUBJECTS]

with_each = pytest.mark.parametrize("subject", [*OURS, *OTHERS], ids=str)
with_ours = pytest.mark.parametrize("subject", OURS, ids=str)


@pytest.fixture
def store(tmp_path) -> str:
    return f"file://{tmp_path}/store?max=2GiB"


@with_each
def test_every_tier_gives_the_same_tokens_c32(subject: Subject, store: str) -> None:
    scenarios.every_tier(subject, store)


@pytest.mark.parametrize("subject", EAGER, ids=str)
def test_without_graphs_too_c32(subject: Subject, store: str) -> None:
    scenarios.every_tier(subject, store)


@with_ours
@pytest.mark.parametrize("chunk_tokens", [16, 64, WHOLE])
def test_chunk_sizes_and_mixed_batches_c32(subject: Subject, chunk_tokens: int) -> None:
    scenarios.chunks_and_mixed_batches(subject, subject.ask(), chunk_tokens)


@pytest.mark.parametrize("subject", OTHERS, ids=str)
def test_mixed_batches_of_other_architectures_c32(subject: Subject) -> None:
    scenarios.chunks_and_mixed_batches(subject, subject.ask(), 64)


@with_each
def test_preempted_requests_go_on_where_they_were_c32(subject: Subject) -> None:
    scenarios.preemption(subject, subject.two(), num_tokens=28)


@pytest.mark.parametrize("subject", [s for s in OURS if s.components == ("full",)], ids=str)
@pytest.mark.parametrize("policy", WritePolicy)
def test_under_eviction_c32(subject: Subject, policy: WritePolicy, store: str) -> None:
    scenarios.eviction(subject, store, policy)


@pytest.mark.parametrize(
    ("subject", "component"),
    [(s, part) for s in [*OURS, *OTHERS] if len(s.components) > 1 for part in s.components],
    ids=str,
)
def test_when_one_component_is_evicted_c32(subject: Subject, component: str, store: str) -> None:
    scenarios.eviction_of(subject, component, store)


@pytest.mark.parametrize("subject", [s for s in OURS if s.components == ("full",)], ids=str)
def test_wrong_pages_are_noticed_c32(subject: Subject) -> None:
    scenarios.wrong_pages(subject, subject.ask()[0])
