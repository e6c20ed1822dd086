"""Every single failure is repaired, or failed over, with the right tokens; and all comes back.

One prefill engine or two, one decode engine, in this process, over real sockets and a real store.
After each test every page and lease is back on every side that lives (`Pair.settle`).
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from e2e.disagg.pair import Pair, pair
from e2e.exactness.scenarios import WAIT
from e2e.exactness.subjects import PAGE, TINY_LLAMA, TINY_SUBJECTS, Prompt, Subject
from quire.disagg.handover import Handover, Stage
from quire.engine.messages import AbortRequest, Finish, Generate, Output, Outputs, SamplingParams
from quire.messages import Fetch
from quire.types import DEVICE, PageStatus, RequestId, Tier

SUBJECTS = [TINY_LLAMA, *(s for s in TINY_SUBJECTS if s.name in ("qwen3_next", "gemma3"))]
every_kind = pytest.mark.parametrize("subject", SUBJECTS, ids=str)
plain = pytest.mark.parametrize("subject", SUBJECTS[:1], ids=str)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def _url(folder: Path) -> str:
    return f"file://{folder}?max=1GiB"


def _turn(subject: Subject, prompt: Prompt, answer: list[int]) -> Prompt:
    return [*prompt, *answer, *subject.cut(600, 2 * PAGE + 3)]


def _warmed(both: Pair, subject: Subject) -> list[Prompt]:
    """Two conversations, whose first turns only the store remembers; returns their second."""
    prompts = [subject.ask()[0], subject.ask()[3]]
    answers = both.ask(subject, prompts, "first turn")
    both.flush(Tier.HOST, Tier.DEVICE)
    return [
        _turn(subject, prompt, answer.tokens)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


# ---- the own part falls short: it is repaired from prefill (C26) ---------------------------------


def _pages_of(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096
    )


@every_kind
def test_store_pages_deleted_between_probe_and_fetch_c26(
    subject: Subject, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    with pair(subject, _url(folder), decode_options=WAIT) as both:
        turns = _warmed(both, subject)
        intakes = both.decode.manager._fetches._intakes
        send, deleted = intakes.send, []

        def delete_and_send(*args: Any) -> Any:
            if not deleted:
                for path in _pages_of(folder)[::2]:
                    path.unlink()
                    deleted.append(path)
            return send(*args)

        patch.setattr(intakes, "send", delete_and_send)
        both.ask(subject, turns, "deleted")
        assert deleted
        assert both.decode.exchange is not None
        assert both.decode.exchange.receiver.counters.repairs["restore"]
        both.settle()


@every_kind
def test_corrupt_store_pages_c26(subject: Subject, folder: Path) -> None:
    with pair(subject, _url(folder), decode_options=WAIT) as both:
        turns = _warmed(both, subject)
        for path in _pages_of(folder)[::2]:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
        both.ask(subject, turns, "corrupt")
        both.settle()


@every_kind
def test_a_fetch_that_raises_when_it_starts_c26(
    subject: Subject, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    with pair(subject, _url(folder), decode_options=WAIT) as both:
        turns = _warmed(both, subject)
        worker = both.decode._executor.workers.workers[0]  # type: ignore[attr-defined]
        start, raised = worker._start_pages, []

        def failing(command: Any, *rest: Any) -> None:
            if isinstance(command, Fetch) and command.source is None:
                raised.append(command.op)
                raise OSError("no more files can be opened")
            start(command, *rest)

        patch.setattr(worker, "_start_pages", failing)
        both.ask(subject, turns, "raising")
        assert raised
        assert both.decode.exchange is not None
        assert both.decode.exchange.receiver.counters.repairs["restore"]
        both.settle()


@every_kind
def test_host_pages_evicted_all_the_time_c26(subject: Subject, folder: Path) -> None:
    with pair(subject, _url(folder), decode_options=WAIT) as both:
        turns = _warmed(both, subject)
        both.each_step = lambda: [  # type: ignore[assignment]
            engine.manager.flush(Tier.HOST) for engine in both.engines
        ]
        both.ask(subject, turns, "evicted")
        both.each_step = lambda: None
        both.settle()


@every_kind
def test_device_allocation_failing_c26(
    subject: Subject, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    with pair(subject, _url(folder), decode_options=WAIT) as both:
        turns = _warmed(both, subject)
        core, refused = both.decode.manager._core, []
        room, allocator = core.room, core.allocators[DEVICE]
        allocate = allocator.allocate

        def no_room(slot: int) -> int:
            if slot != DEVICE or len(refused) == 40:
                return room(slot)
            refused.append(slot)
            return 0

        patch.setattr(core, "room", no_room)
        patch.setattr(
            allocator, "allocate", lambda count: allocate(count) if len(refused) == 40 else None
        )
        both.ask(subject, turns, "refused")
        assert len(refused) == 40
        both.settle()


@plain
def test_what_was_promised_is_used_though_the_tree_changes_c27(subject: Subject) -> None:
    """While a request's pages move, its own prefix is computed by nobody, grows by another's turn,
    and all that nobody holds is evicted."""
    with pair(subject) as both:
        prompt = subject.ask()[0]
        (first,) = both.ask(subject, [prompt], "first turn")
        turn = _turn(subject, prompt, first.tokens)
        longer = [*turn, *subject.cut(900, 40)]

        def shake() -> None:
            for engine in both.engines:
                engine.manager.flush(Tier.HOST)
                engine.manager.flush(Tier.DEVICE)

        both.each_step = shake
        both.ask(subject, [turn, longer, turn], "shaken")
        both.each_step = lambda: None
        both.settle()


# ---- prefill fails -------------------------------------------------------------------------------


def _stop(both: Pair, number: int) -> None:
    """As a process that is killed: it says nothing any more, and its sockets are closed."""
    engine = both.prefills.pop(number)
    assert engine.exchange is not None
    engine.exchange.close()
    for worker in engine._executor.workers.workers:  # type: ignore[attr-defined]
        worker._peering.close(1.0)


def _moving(both: Pair) -> list[Handover]:
    assert both.decode.exchange is not None
    return list(both.decode.exchange.receiver.open)


WHEN: dict[str, Callable[[Handover], bool]] = {
    "looking": lambda handover: handover.stage is Stage.LOOKING,
    "before": lambda handover: handover.current is None,
    "asked": lambda handover: handover.current is not None,
}


class Moment:
    """Of a request's life. "during" does not depend on who is faster: decode's first read from a
    peer is held when its bytes are there, until `pass_by`, and then half of it is lost."""

    def __init__(self, both: Pair, when: str, patch: pytest.MonkeyPatch) -> None:
        self._both = both
        self._when = when
        self._is_read, self._go_on = threading.Event(), threading.Event()
        if when != "during":
            return
        client = both.decode._executor.workers.workers[0]._peering.client  # type: ignore[attr-defined]
        read = client.read

        def held(*args: Any, **options: Any) -> list[PageStatus]:
            statuses: list[PageStatus] = read(*args, **options)
            if not self._is_read.is_set():
                self._is_read.set()
                assert self._go_on.wait(60)
                kept = len(statuses) // 2
                statuses = statuses[:kept] + [PageStatus.FAILED] * (len(statuses) - kept)
            return statuses

        patch.setattr(client, "read", held)

    def reached(self) -> bool:
        if self._when == "during":
            return self._is_read.is_set()
        if self._when == "after":
            return bool(self._both.decode.scheduler.running)
        return any(WHEN[self._when](handover) for handover in _moving(self._both))

    def pass_by(self) -> None:
        self._go_on.set()


@pytest.mark.parametrize("when", ["before", "asked", "during", "after"])
@every_kind
def test_prefill_killed_and_another_takes_over_c28(
    subject: Subject, when: str, patch: pytest.MonkeyPatch
) -> None:
    prompts = [subject.ask()[0], subject.ask()[3]]
    options = {"chunk_tokens": 2 * PAGE}
    with pair(subject, num_prefills=2, prefill_options=options) as both:
        moment = Moment(both, when, patch)
        killed: list[bool] = []

        def kill() -> None:
            if not killed and moment.reached():
                killed.append(True)
                _stop(both, 0)
                moment.pass_by()

        both.each_step = kill
        both.ask(subject, prompts, when)
        assert killed
        both.settle()


@plain
@pytest.mark.parametrize("when", ["before", "during"])
def test_prefill_killed_and_nobody_is_left_then_decode_computes_c28(
    subject: Subject, when: str, patch: pytest.MonkeyPatch
) -> None:
    with pair(subject, prefill_options={"chunk_tokens": PAGE}) as both:
        moment = Moment(both, when, patch)

        def kill() -> None:
            if both.prefills and moment.reached():
                _stop(both, 0)
                moment.pass_by()

        both.each_step = kill
        both.ask(subject, [subject.ask()[0]], when)
        assert not both.prefills
        assert both.decode.exchange is not None
        assert both.decode.exchange.receiver.counters.local == {"no_peer": 1}
        both.settle()


def _generate(name: str, prompt: Prompt) -> Generate:
    params = SamplingParams(max_tokens=8, temperature=0)
    return Generate(RequestId(name), np.array(prompt, dtype="<i4").tobytes(), params)


@every_kind
def test_pages_that_do_not_arrive_are_asked_for_again_c26(
    subject: Subject, patch: pytest.MonkeyPatch
) -> None:
    """The line between the page servers is cut, twice, in the middle."""
    with pair(subject, prefill_options={"chunk_tokens": 2 * PAGE}) as both:
        client = both.decode._executor.workers.workers[0]._peering.client  # type: ignore[attr-defined]
        read, broken = client.read, []

        def breaking(*args: Any, **options: Any) -> Any:
            statuses = read(*args, **options)
            if len(broken) < 2:
                broken.append(len(statuses))
                return [PageStatus.FAILED] * len(statuses)
            return statuses

        patch.setattr(client, "read", breaking)
        both.ask(subject, [subject.ask()[0]], "cut")
        assert len(broken) == 2
        assert both.decode.exchange is not None
        assert both.decode.exchange.receiver.counters.repairs["failed"]
        both.settle()


# ---- the client goes away ------------------------------------------------------------------------


@pytest.mark.parametrize("when", [*WHEN, "during", "after"])
@every_kind
def test_client_disconnects_in_each_state_c28(
    subject: Subject, when: str, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    with pair(
        subject, _url(folder), prefill_options={"chunk_tokens": PAGE}, decode_options=WAIT
    ) as both:
        prompt = _warmed(both, subject)[0]
        if when in ("asked", "during"):  # a long one that nobody knows: chunk after chunk is sent
            prompt = subject.ask()[4]
        moment = Moment(both, when, patch)
        both.decode.handle(_generate("gone", prompt))
        for _ in range(200_000):
            if moment.reached():
                break
            both.steps(1)
        else:
            raise AssertionError(f"it was never {when}")
        both.decode.handle(AbortRequest(RequestId("gone")))
        moment.pass_by()
        both.settle()
        assert not [m for m in both.decode.take_messages() if isinstance(m, Outputs) and m.outputs]
        both.ask(subject, [prompt], "asked again")
        both.settle()


# ---- one among many ------------------------------------------------------------------------------


@plain
def test_a_slow_restore_holds_back_nobody_else_c29(
    subject: Subject, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    """The store does not answer for one request's pages; others, asked after it, whose pages are
    none of those, finish."""
    with pair(subject, _url(folder), decode_options=WAIT) as both:
        slow = _warmed(both, subject)[0]
        others = [prompt[1:] for prompt in subject.ask()[1:3]]  # nor do they want its pages
        # However long the others take here, the slow one is waited for.
        object.__setattr__(both.decode.manager.config.prefetch, "max_timeout_s", 600.0)
        answered, go_on = threading.Event(), threading.Event()
        worker = both.decode._executor.workers.workers[0]  # type: ignore[attr-defined]
        lease = worker._attachment.borrow()
        store, get = lease.store, lease.store.get
        lease.release()

        def waiting(*args: Any, **options: Any) -> list[PageStatus]:
            if not answered.is_set():
                answered.set()
                assert go_on.wait(60)
            statuses: list[PageStatus] = get(*args, **options)
            return statuses

        patch.setattr(store, "get", waiting)
        both.decode.handle(_generate("slow", slow))
        for _ in range(200_000):
            if answered.is_set():
                break
            both.steps(1)
        assert answered.is_set()
        both.ask(subject, others, "beside a slow one")
        assert [handover.owner for handover in _moving(both)] == ["slow"]
        go_on.set()
        finished: list[Output] = []
        while not finished:
            finished = [output for output in both.steps(1) if output.finish is not None]
        assert finished[0].finish is Finish.LENGTH
        both.settle()
        both.ask(subject, [slow], "again")
        both.settle()


@plain
@pytest.mark.parametrize("address", ["nonsense", "rdma://127.0.0.1:9", "tcp://127.0.0.1"])
def test_an_address_that_is_none_fails_its_request_and_nothing_else(
    subject: Subject, address: str
) -> None:
    with pair(subject) as both:
        wrong = msgspec.structs.replace(_generate("wrong", subject.ask()[0]), prefill=[address])
        both.decode.handle(wrong)
        (output,) = [o for o in both.steps(1) if o.finish is not None]
        assert output.finish is Finish.ERROR
        both.ask(subject, subject.ask()[:1], "the next")
        both.settle()
