"""Without speculation a step does not do more than it did before there was any."""

import sys
from pathlib import Path

import quire.engine.scheduler
from engine_support import TinyEngine

ENGINE = Path(quire.engine.scheduler.__file__).parent
MOST = 30
"""Functions of the engine called for each request that decodes: 28. Before there was any
speculation, 36; with it, and off, once 35."""
REQUESTS = 16


def called(tiny: TinyEngine, num_steps: int) -> list[tuple[str, str]]:
    """File and name of each function of the engine, as often as it was called in plain steps."""
    found: list[tuple[str, str]] = []

    def watch(frame, event, _arg) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if event == "call" and path.parent == ENGINE and not name.startswith("<"):
            found.append((path.name, name))

    launch = tiny.model.launch
    collect = tiny.model.collect

    def unwatched(work):
        def run(*args):
            sys.setprofile(None)
            try:
                return work(*args)
            finally:
                sys.setprofile(watch)

        return run

    tiny.model.launch, tiny.model.collect = unwatched(launch), unwatched(collect)
    sys.setprofile(watch)
    try:
        for _ in range(num_steps):
            tiny.engine.step()
    finally:
        sys.setprofile(None)
    return found


def test_plain_steps_call_nothing_of_drafts_and_no_more_than_before() -> None:
    with TinyEngine(device_pages=1024, max_running=REQUESTS, chunk_tokens=1024) as tiny:
        for i in range(REQUESTS):
            tiny.ask([i, 1, 2, 3, 4], 60)
        tiny.step(4)
        assert len(tiny.scheduler.running) == REQUESTS
        found = called(tiny, 8)
    assert not {name for name, _ in found} & {"drafting.py", "branches.py"}
    assert len(found) / (8 * REQUESTS) <= MOST
