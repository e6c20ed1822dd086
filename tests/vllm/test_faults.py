"""What may go wrong around the real vLLM: it is killed, its store is dead, dies, hangs or is slow,
its loads fail. Requests go on with the tokens of vLLM alone, nothing stays held, nothing loops.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from store_servers import Valkey
from vllm_engines import (
    FORGET,
    LONG,
    MANY,
    PAGE,
    SETTLE,
    Engines,
    Subject,
    ask,
    is_clean,
    send,
    whole_pages,
)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    server = Valkey(tmp_path)
    yield server
    server.stop()


def test_killed_while_it_saves_and_while_it_loads(
    engines: Engines, small: Subject, tmp_path: Path
) -> None:
    folder, mark = tmp_path / "store", tmp_path / "loading"
    folder.mkdir()
    slowly = f"faulty+file://{folder}?delay=1&delay_s=0.2"
    engines.killed(small.model, [ask(LONG), ask(*MANY), SETTLE], slowly, lambda: has_pages(folder))
    engines.killed(
        small.model,
        [ask(LONG), ask(LONG)],
        f"file://{folder}",
        mark.exists,
        connector="StallingConnector",
        module="sabotage",
        environment={"QUIRE_TEST_MARK": str(mark)},
    )
    steps = [ask(LONG), ask(*MANY), FORGET, ask(LONG), SETTLE]
    one, many, _, again, end = engines.quire(small.model, steps, f"file://{folder}")
    assert one["tokens"] == again["tokens"] == small.long
    assert one["cached"][0] > 0, "what had been written is found"
    assert again["cached"] == [whole_pages(LONG)]
    assert many["tokens"] == small.many
    assert is_clean(end)


def has_pages(folder: Path) -> bool:
    """Published ones: what is still being written nobody finds."""
    found = [path for path in folder.glob("objects/*/*") if not path.name.startswith(".")]
    return len(found) > 2


def test_a_store_that_is_not_there(engines: Engines, small: Subject) -> None:
    one, _, again, end = engines.quire(
        small.model, [ask(LONG), FORGET, ask(LONG), SETTLE], "redis://127.0.0.1:1"
    )
    assert one["tokens"] == again["tokens"] == small.long
    assert again["cached"] == [whole_pages(LONG)], "the host tier works without it"
    assert is_clean(end)


def test_a_store_that_hangs_comes_back_and_dies(
    engines: Engines, small: Subject, valkey: Valkey
) -> None:
    pid = valkey.process_id
    (_, _) = engines.quire(small.model, [ask(LONG), SETTLE], valkey.url)
    steps = [ask(MANY[0]), send(pid, signal.SIGSTOP), ask(LONG), ask(*MANY)]
    steps += [send(pid, signal.SIGCONT), FORGET, ask(LONG), send(pid, signal.SIGKILL), FORGET]
    steps += [ask(LONG), ask(*MANY), SETTLE]
    found = engines.quire(small.model, steps, valkey.url, extra={"wait_s": 2})
    _, _, hanging, many, _, _, back, _, _, dead, many_dead, end = found
    for one in (hanging, back, dead):
        assert one["tokens"] == small.long
    assert many["tokens"] == many_dead["tokens"] == small.many
    assert dead["cached"] == [whole_pages(LONG)], "from the host"
    assert is_clean(end)


@pytest.mark.long
def test_a_store_slower_than_anybody_waits_for(
    engines: Engines, small: Subject, tmp_path: Path
) -> None:
    (_, _) = engines.quire(small.model, [ask(LONG), SETTLE], f"file://{tmp_path}")
    slow = f"faulty+file://{tmp_path}?delay=1&delay_s=1.5"
    steps = [ask(LONG), ask(*MANY), SETTLE]
    one, many, end = engines.quire(small.model, steps, slow, extra={"wait_s": 0.5})
    assert one["tokens"] == small.long
    assert many["tokens"] == small.many
    assert is_clean(end)


def test_loads_that_fail_are_computed_and_not_offered_again(
    engines: Engines, small: Subject
) -> None:
    steps = [ask(LONG), ask(*MANY), FORGET, ask(LONG), ask(*MANY), SETTLE]
    cold, _, _, one, many, end = engines.quire(
        small.model, steps, connector="FailingConnector", module="sabotage"
    )
    assert cold["tokens"] == one["tokens"] == small.long
    assert many["tokens"] == small.many
    once = sum(len(tokens) // PAGE for tokens in (LONG, *MANY))
    assert 0 < end["counters"]["load_failed_pages"] <= once, "each is tried once at most"
    assert is_clean(end)
