"""C32 for models with windows and recurrent layers: every kind of state comes back, or none does.

And the proof that these comparisons would notice: what is restored is withheld or exchanged on its
way to the model, and the answers must differ.
"""

import msgspec
import pytest

from e2e.exactness import scenarios
from e2e.exactness.oracle import Answer, differences, reference
from e2e.exactness.rig import WHOLE, Tamper, engine_rig
from e2e.exactness.subjects import GEMMA, HYBRIDS, PAGE, TINY_SUBJECTS, Prompt, Subject
from quire.engine.batch import Segment
from quire.types import NO_SLOT, PAGE_ID_BYTES, PageIds

LONG = {GEMMA.name: [pytest.mark.long]}
"""Real weights take half a minute each time: in `make test` a server has them (test_windows.py)."""
with_each_if_long = pytest.mark.parametrize(
    "subject", [pytest.param(s, marks=LONG.get(s.name, [])) for s in HYBRIDS], ids=str
)
recurrent = [subject for subject in HYBRIDS if "recurrent" in subject.components]
windowed = [subject for subject in HYBRIDS if "window" in subject.components]


@with_each_if_long
def test_every_tier_gives_the_same_tokens_c32(subject: Subject, store: str) -> None:
    scenarios.every_tier(subject, store)


@with_each_if_long
def test_prompts_that_branch_around_a_snapshot_c32(subject: Subject) -> None:
    scenarios.branches(subject)


@pytest.mark.parametrize("subject", TINY_SUBJECTS, ids=str)
def test_a_conversation_goes_on_from_every_tier_c32(subject: Subject, store: str) -> None:
    scenarios.conversation(subject, store, num_turns=4)


@pytest.mark.parametrize(
    ("subject", "chunk_tokens"),
    [(subject, chunk) for subject in TINY_SUBJECTS for chunk in (16, 64, WHOLE)],
    ids=str,
)
def test_chunk_sizes_and_mixed_batches_c32(subject: Subject, chunk_tokens: int) -> None:
    scenarios.chunks_and_mixed_batches(subject, subject.ask(), chunk_tokens)


@pytest.mark.parametrize("subject", TINY_SUBJECTS, ids=str)
def test_preempted_requests_go_on_where_they_were_c32(subject: Subject) -> None:
    scenarios.preemption(subject, subject.two(), num_tokens=28)


@pytest.mark.parametrize(
    ("subject", "component"),
    [pytest.param(s, part, marks=LONG.get(s.name, [])) for s in HYBRIDS for part in s.components],
    ids=str,
)
def test_when_one_component_is_evicted_c32(subject: Subject, component: str, store: str) -> None:
    scenarios.eviction_of(subject, component, store)


def test_windows_on_two_ranks_c24_c32(store: str) -> None:
    scenarios.two_ranks(next(s for s in TINY_SUBJECTS if s.name == "gemma3"), store)


@with_each_if_long
def test_a_hit_that_the_host_cannot_hold_is_used_whole_c22_c32_c51(
    subject: Subject, store: str
) -> None:
    scenarios.more_than_the_host_holds(subject, store)


# ---- negative controls ---------------------------------------------------------------------------


def are_resumed(segments: list[Segment]) -> bool:
    """Both requests, in one batch, from snapshots of their own."""
    slots = {segment.restore for segment in segments if segment.start > 0} - {NO_SLOT}
    return len(segments) == len(slots) == 2


def withheld(segments: list[Segment]) -> list[Segment] | None:
    if not are_resumed(segments):
        return None
    return [msgspec.structs.replace(segment, restore=NO_SLOT) for segment in segments]


def exchanged_snapshots(segments: list[Segment]) -> list[Segment] | None:
    if not are_resumed(segments):
        return None
    slots = [segment.restore for segment in segments]
    return [
        msgspec.structs.replace(segment, restore=slot)
        for segment, slot in zip(segments, slots[::-1], strict=True)
    ]


def exchanged_window_pages(segments: list[Segment]) -> list[Segment] | None:
    """The last full page before the first token to compute, of one request for another's."""
    if len(segments) != 2 or not all(segment.start >= PAGE for segment in segments):
        return None
    at = [
        (segment.start // PAGE - 1 - segment.window_first) * PAGE_ID_BYTES for segment in segments
    ]
    pages = [segment.window[i : i + PAGE_ID_BYTES] for segment, i in zip(segments, at, strict=True)]
    return [
        msgspec.structs.replace(
            segment,
            window=PageIds(segment.window[:i] + page + segment.window[i + PAGE_ID_BYTES :]),
        )
        for segment, i, page in zip(segments, at, pages[::-1], strict=True)
    ]


def assert_all_differ(subject: Subject, prompts: list[Prompt], answers: list[Answer]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        with pytest.raises(AssertionError, match="gap"):
            differences(reference(subject, prompt), answer)


@pytest.mark.parametrize(
    ("subject", "tamper"),
    [
        *((subject, withheld) for subject in recurrent),
        *((subject, exchanged_snapshots) for subject in recurrent),
        *(
            pytest.param(subject, exchanged_window_pages, marks=LONG.get(subject.name, []))
            for subject in windowed
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_wrong_state_is_noticed_c32(subject: Subject, tamper: Tamper) -> None:
    prompts = subject.two()
    with engine_rig(subject, host_pages=0) as rig:
        scenarios.ask(subject, rig, prompts, "cold")
        with rig.tampering(tamper):
            answers = rig.answer(prompts, subject.num_tokens)
        assert rig.reused("device") > 0
    assert_all_differ(subject, prompts, answers)
