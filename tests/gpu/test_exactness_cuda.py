"""C32 on CUDA in float32: the scenarios of the CPU, exactly, for every architecture.

With graphs unless it says otherwise. What is tampered with must be noticed here too.
"""

from typing import Any

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
_CUDA = {"device": "cuda", "max_running": 8}
OURS = {subject.name: subject.under(**_CUDA) for subject in DENSE_SUBJECTS}
OTHERS = {subject.name: subject.under(**_CUDA) for subject in TINY_SUBJECTS}
ALL = OURS | OTHERS


def with_those(*names: str, **options: Any) -> pytest.MarkDecorator:
    found = [ALL[name].under(**_CUDA, **options) for name in names or ALL]
    return pytest.mark.parametrize("subject", found, ids=str)


@pytest.fixture
def store(tmp_path) -> str:
    return f"file://{tmp_path}/store?max=2GiB"


@with_those()
def test_every_tier_gives_the_same_tokens_c32(subject: Subject, store: str) -> None:
    scenarios.every_tier(subject, store)


@with_those("dense_llama", "dense_gemma3", "qwen3_next", "gpt_oss", cuda_graphs=False)
def test_without_graphs_too_c32(subject: Subject, store: str) -> None:
    scenarios.every_tier(subject, store)


@with_those("dense_llama", "dense_qwen3_biases")
@pytest.mark.parametrize("chunk_tokens", [16, WHOLE])
def test_chunk_sizes_c32(subject: Subject, chunk_tokens: int) -> None:
    scenarios.chunks_and_mixed_batches(subject, subject.ask(), chunk_tokens)


@with_those("dense_mistral", "dense_qwen2", "dense_qwen3", "dense_gemma3", "falcon_h1", "gpt_oss")
def test_mixed_batches_c32(subject: Subject) -> None:
    scenarios.chunks_and_mixed_batches(subject, subject.ask(), 64)


@with_those("dense_llama", "dense_gemma3", "nemotron_h", "lfm2", "gpt_oss")
def test_preempted_requests_go_on_where_they_were_c32(subject: Subject) -> None:
    scenarios.preemption(subject, subject.two(), num_tokens=28)


@with_those("dense_llama")
@pytest.mark.parametrize("policy", WritePolicy)
def test_under_eviction_c32(subject: Subject, policy: WritePolicy, store: str) -> None:
    scenarios.eviction(subject, store, policy)


@pytest.mark.parametrize(
    ("name", "component"),
    [("dense_gemma3", "window"), ("qwen3_next", "recurrent"), ("gpt_oss", "full")],
)
def test_when_one_component_is_evicted_c32(name: str, component: str, store: str) -> None:
    scenarios.eviction_of(ALL[name], component, store)


@with_those("dense_llama")
def test_wrong_pages_are_noticed_c32(subject: Subject) -> None:
    scenarios.wrong_pages(subject, subject.ask()[0])
