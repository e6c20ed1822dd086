"""Prefill and decode servers with one store: every tier and side, over HTTP (C25–C27, C30–C32).

One conversation for each kind of model. The answers must be those of stock transformers; what was
sent must be exactly what decode did not have; and in the end nothing may be held anywhere.
"""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.disagg.servers import Node, Reply, check, pages_of, running
from e2e.exactness.subjects import GEMMA, PAGE, SMOLLM2, TINY_SUBJECTS, Prompt, Subject
from e2e.serving.server import wait_until

HYBRID = next(subject for subject in TINY_SUBJECTS if subject.name == "falcon_h1")
NUM_TOKENS = 6
_REST = PAGE - 3
"""Tokens of each prompt's last page: a few more, and decode has completed it."""
REAL = {"device_memory": "96MiB", "host_memory": "192MiB", "threads": 2}


class Conversation:
    """Asks the decode server, and keeps the books of what is sent to it."""

    def __init__(self, subject: Subject, prefill: Node, decode: Node) -> None:
        self.subject = subject
        self.prefill = prefill
        self.decode = decode
        self.prompt: Prompt = subject.cut(0, subject.length // PAGE * PAGE + _REST)
        self.answer: list[int] = []

    def ask(self) -> tuple[Reply, int]:
        """Asks for what comes next; the answer, and the `full` pages that were sent for it."""
        before, sent_before = self.decode.handover(), self.prefill.handover()
        reply = self.decode.ask(self.prompt, NUM_TOKENS, prefill=[self.prefill.peer])
        self.answer = check(self.subject, self.prompt, reply)
        assert self.answer, "a tie within fp32 noise: choose another prompt"
        self._check_usage(reply)
        after = self.decode.handover()
        pages, size = (
            after[f"received_{what}"] - before[f"received_{what}"] for what in ("pages", "bytes")
        )

        def is_counted() -> bool:
            """Whoever sends counts afterwards, when the answer may have been given."""
            sent = self.prefill.handover()
            return (pages, size) == tuple(
                sent[f"sent_{what}"] - sent_before[f"sent_{what}"] for what in ("pages", "bytes")
            )

        wait_until(is_counted, "what was received is what was sent")
        return reply, self._full_pages(pages, size)

    def go_on(self) -> int:
        """The next turn. Returns what of it was said before, in pages."""
        said = len(self.prompt) + len(self.answer)
        known = (said - 1) // PAGE  # the last token was never computed
        assert known > self.num_pages, "a page that decode completed"
        more = self.subject.cut(300 + said, 3 * PAGE + (_REST - said) % PAGE)
        self.prompt = [*self.prompt, *self.answer, *more]
        return known

    @property
    def num_pages(self) -> int:
        return pages_of(len(self.prompt))

    def _check_usage(self, reply: Reply) -> None:
        """C30: the parts make up the whole, and no token counts twice."""
        assert reply.usage["prompt_tokens"] == len(self.prompt)
        assert sum(reply.cached.values()) + sum(reply.at_prefill.values()) == reply.total
        assert reply.total <= self.num_pages * PAGE

    def _full_pages(self, pages: int, size: int) -> int:
        """Bytes are pages times their size, to the byte; all but full pages are few."""
        bytes_of = self.decode.page_bytes()
        full = bytes_of.pop("full")
        if not bytes_of:
            assert size == pages * full
            return pages
        (other,) = bytes_of.values()
        # pages = x + y, size = x * full + y * other
        count, rest = divmod(size - pages * other, full - other)
        assert rest == 0
        assert 0 <= count <= pages
        assert (count < pages) == (pages > 0), "its window, or its state, is sent too"
        return count


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path: local sockets are made in it."""
    with tempfile.TemporaryDirectory(prefix="quire-") as name:
        yield Path(name)


@contextlib.contextmanager
def servers(
    subject: Subject, folder: Path, variants: dict[str, dict[str, Any]], store: str = ""
) -> Iterator[tuple[Node, dict[str, Node]]]:
    """A prefill server, and decode servers of some kinds, with one store."""
    options: dict[str, Any] = {
        "store": store or f"file://{folder}/store?max=1GiB",
        "prefetch_policy": "wait_complete",
        "prefetch_threshold": PAGE,
    }
    if not subject.is_quick:
        options |= REAL
    prefill = Node(folder / "prefill", subject, role="prefill", **options)
    decodes = {
        name: Node(folder / name, subject, role="decode", **options | more)
        for name, more in variants.items()
    }
    with running(prefill, *decodes.values()):
        yield prefill, decodes


SWITCHED_OFF: dict[str, dict[str, Any]] = {
    "no_cache": {"decode_cache": "false"},
    "no_restore": {"decode_restore": "false"},
}


@pytest.mark.parametrize(
    ("subject", "variants"),
    [
        (SMOLLM2, {}),
        pytest.param(GEMMA, {}, marks=pytest.mark.long),
        (HYBRID, SWITCHED_OFF),
    ],
    ids=["smollm2", "gemma3_270m", "falcon_h1"],
)
def test_a_conversation_through_every_tier_and_side_c25_c30_c31_c32(
    subject: Subject, variants: dict[str, dict[str, Any]], folder: Path
) -> None:
    with servers(subject, folder, {"decode": {}} | variants) as (prefill, decodes):
        talk = Conversation(subject, prefill, decodes["decode"])
        both = (prefill, talk.decode)

        # Cold: nobody has anything, all of it is sent.
        reply, sent = talk.ask()
        assert (reply.total, sent) == (0, talk.num_pages)

        # Again: decode has it all; not a page is sent, and the first token comes all the same.
        reply, sent = talk.ask()
        assert (reply.cached, sent) == ({"device": talk.num_pages * PAGE}, 0)

        # From decode's host.
        talk.decode.flush("device")
        reply, sent = talk.ask()
        assert (reply.cached, sent) == ({"host": talk.num_pages * PAGE}, 0)

        # The next turn: what decode has, its own words too, is not sent.
        known = talk.go_on()
        reply, sent = talk.ask()
        assert reply.cached == {"device": known * PAGE}
        assert sent == talk.num_pages - known

        # And the next, after both have lost all but the store.
        known = talk.go_on()
        for node in both:
            node.flush("host", "device")
        reply, sent = talk.ask()
        # What prefill computes of it goes to the store too: decode may find it there first.
        restored = talk.num_pages - sent
        assert known <= restored
        assert reply.cached == {"store": restored * PAGE}
        assert not reply.at_prefill  # what prefill found is not what it sent

        if variants:
            _check_switched_off(talk, decodes)
        for node in (prefill, *decodes.values()):
            node.wait_clean()
            assert node.handover()["local"] == {}
            assert node.handover()["repairs"] == {}
        if variants:
            talk.decode = decodes["decode"]
            _check_damage(talk, folder / "store")
            _check_shaken(talk)
            for node in both:
                node.wait_clean()


def _check_damage(talk: Conversation, store: Path) -> None:
    """C26: half of what the store has is damaged. If decode has promised it when that is found out,
    which nobody knows before, the promise is repaired, once; else it asks for more at once, or
    finds what prefill has computed and written anew."""
    talk.go_on()
    for node in (talk.prefill, talk.decode):
        node.flush("host", "device")
    pages = [path for path in sorted(store.rglob("*")) if path.is_file()]
    for path in [path for path in pages if path.stat().st_size > 4096][::2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    talk.ask()
    assert list((store / "quarantine").iterdir())
    found = talk.decode.handover()
    failed = found["restores"]["failed"]["count"] if "failed" in found["restores"] else 0
    assert failed == (1 if found["repairs"].get("restore") else 0)


def _check_shaken(talk: Conversation) -> None:
    """C27: whatever nobody holds is evicted all the time, on both sides, while pages move."""
    nodes, stop = (talk.prefill, talk.decode), threading.Event()

    def shake() -> None:
        while not stop.is_set():
            for node in nodes:
                node.flush("host", "device", at_once=True)

    shaking = threading.Thread(target=shake)
    shaking.start()
    try:
        for _ in range(3):
            talk.go_on()
            talk.ask()
    finally:
        stop.set()
        shaking.join()


def _check_switched_off(talk: Conversation, decodes: dict[str, Node]) -> None:
    """The same answers, for more pages. What prefill has is counted on its side."""
    whole = talk.num_pages
    talk.decode = decodes["no_cache"]
    for _ in range(2):
        reply, sent = talk.ask()
        assert sent == whole
        assert (reply.cached, reply.at_prefill) == ({}, {"device": whole * PAGE})
        talk.decode.wait_clean()
    talk.prefill.flush("device")
    reply, sent = talk.ask()
    assert sent == whole
    assert (reply.cached, reply.at_prefill) == ({}, {"host": whole * PAGE})

    talk.decode = decodes["no_restore"]
    reply, sent = talk.ask()
    assert (reply.cached, sum(reply.at_prefill.values())) == ({}, whole * PAGE)
    assert sent == whole
    reply, sent = talk.ask()
    assert (reply.cached, sent) == ({"device": whole * PAGE}, 0)
    talk.decode.flush("device")  # the host has it, and the store, and neither is asked
    reply, sent = talk.ask()
    assert (reply.cached, sum(reply.at_prefill.values())) == ({}, whole * PAGE)
    assert sent == whole
