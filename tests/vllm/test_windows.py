"""Models with windows inside the real vLLM, with its hybrid KV cache manager: several groups of
layers, of which those with windows keep only what is behind the end.

Prompts are longer than Gemma's windows of 512 tokens.
"""

from pathlib import Path

import pytest

from vllm_engines import (
    ANSWER,
    FORGET,
    PAGE,
    SETTLE,
    Engines,
    Subject,
    ask,
    is_clean,
    prompt,
    whole_pages,
)


def words(number: int, length: int) -> list[int]:
    """That no other prompt begins with."""
    return prompt(number, 2 * length)[length:]


WINDOW_PAGES = 512 // PAGE
FAR = words(21, 810)
NEXT = FAR + words(22, 100)
"""Goes on from it."""
INSIDE = FAR[:600]
"""Ends where no window was kept."""
COMMON = words(23, 18 * PAGE)
SHARING = [COMMON + words(number, 70) for number in (24, 25, 26)]
CHUNKS = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "enable_chunked_prefill": True}
TINY = {"num_gpu_blocks_override": 216, "max_model_len": 1024}
"""A little more than two of those that share, once they are computed."""


@pytest.fixture(scope="module")
def alone(engines: Engines, windows: Subject) -> dict[str, list[list[int]]]:
    """What vLLM answers by itself."""
    asked = {"far": [FAR], "next": [NEXT], "inside": [INSIDE], "sharing": SHARING}
    found = engines.vllm(windows.model, [ask(*prompts) for prompts in asked.values()])
    return {name: one["tokens"] for name, one in zip(asked, found, strict=True)}


def test_prompts_longer_than_the_windows(
    engines: Engines, windows: Subject, alone: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    assert windows.num_groups > 1, "vLLM's hybrid manager is off"
    store = f"file://{tmp_path}?max=2GiB"
    steps = [ask(FAR), SETTLE, FORGET, ask(FAR), FORGET, ask(NEXT), FORGET, ask(INSIDE)]
    for one in SHARING:
        steps += [FORGET, ask(one)]
    found = engines.quire(windows.model, [*steps, SETTLE], store)
    cold, settled, _, host, _, more, _, inside, *sharing, end = found
    assert end["groups"] == windows.num_groups
    assert cold["tokens"] == host["tokens"] == alone["far"]
    assert host["cached"] == [whole_pages(FAR)]
    assert more["tokens"] == alone["next"]
    assert more["cached"] == [whole_pages(FAR)]
    assert inside["tokens"] == alone["inside"]
    assert inside["cached"] == [0], "nothing can be gone on from there"
    assert [one["tokens"][0] for one in sharing[1::2]] == alone["sharing"]
    assert [one["cached"] for one in sharing[1::2]] == [[0], [0], [len(COMMON)]]
    full = (len(FAR) + ANSWER - 1) // PAGE
    assert settled["pools"]["full host"] == full
    assert settled["pools"]["window host"] <= WINDOW_PAGES + full - whole_pages(FAR) // PAGE
    assert is_clean(end)

    steps = [ask(FAR), ask(INSIDE), FORGET, ask(NEXT, *SHARING), SETTLE]
    first, inside, _, many, end = engines.quire(windows.model, steps, store, llm=CHUNKS)
    assert first["tokens"] == alone["far"]
    assert first["cached"] == [whole_pages(FAR)], "from the store, after a restart"
    assert inside["tokens"] == alone["inside"]
    assert many["tokens"] == alone["next"] + alone["sharing"]
    assert min(many["cached"]) > 0
    assert is_clean(end)


def test_a_damaged_window_is_seen_by_these_tests(
    engines: Engines, windows: Subject, alone: dict[str, list[list[int]]]
) -> None:
    cold, _, one = engines.quire(
        windows.model,
        [ask(FAR), FORGET, ask(FAR)],
        connector="DamagingConnector",
        module="sabotage",
        environment={"QUIRE_TEST_COMPONENT": "window"},
    )
    assert cold["tokens"] == alone["far"]
    assert one["tokens"] != alone["far"]


@pytest.mark.long
def test_preempted_with_windows_that_have_moved_on(engines: Engines, windows: Subject) -> None:
    question = ask(*SHARING, max_tokens=120)
    [expected] = engines.vllm(windows.model, [question])
    cold, _, _, again, end = engines.quire(
        windows.model, [question, SETTLE, FORGET, question, SETTLE], llm=CHUNKS | TINY
    )
    assert cold["tokens"] == again["tokens"] == expected["tokens"]
    assert end["preemptions"] > 0, "this should have been too small"
    assert is_clean(end)


@pytest.mark.long
def test_loads_of_several_groups_that_fail_are_computed(
    engines: Engines, windows: Subject, alone: dict[str, list[list[int]]]
) -> None:
    steps = [ask(FAR), FORGET, ask(FAR), ask(*SHARING), SETTLE]
    cold, _, one, many, end = engines.quire(
        windows.model, steps, connector="FailingConnector", module="sabotage"
    )
    assert cold["tokens"] == one["tokens"] == alone["far"]
    assert many["tokens"] == alone["sharing"]
    assert end["counters"]["load_failed_pages"] > 0
    assert is_clean(end)
