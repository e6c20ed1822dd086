"""Two prefill and two decode servers of a tiny model, and a router before them: processes all."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from e2e.disagg.servers import TIMEOUT_S, Node, Program, Reply, check, running
from e2e.exactness.subjects import PAGE, TINY_LLAMA, Prompt
from e2e.serving.server import wait_until

SUBJECT = TINY_LLAMA
LONG = 1700
"""Tokens of a prompt that takes a while: prefill computes one page in a step."""
_STARTS = itertools.count(1)
_MAX_TRIES = 50


class Fleet:
    def __init__(
        self, prefills: list[Node], decodes: list[Node], router: Program, http: httpx.Client
    ) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.router = router
        self.http = http

    @property
    def nodes(self) -> list[Node]:
        return [*self.prefills, *self.decodes]

    @property
    def peers(self) -> list[str]:
        return [node.peer for node in self.prefills]

    def mend(self) -> None:
        """Start those anew that have ended, and wait until the router knows."""
        dead = [node for node in self.nodes if node.ended]
        for node in dead:
            node.start_again()
        for node in dead:
            node.__enter__()
        wait_until(lambda: set(self.states().values()) == {"up"}, f"all are up: {self.states()}")

    def settle(self) -> None:
        for node in self.nodes:
            if not node.ended:
                node.wait_clean()

    def states(self) -> dict[str, str]:
        members = self.http.get("/health").json()["members"]
        return {member["url"]: member["state"] for member in members}

    def metric(self, text: str) -> float:
        """The value of one line of the router's metrics; 0 if there is none yet."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(text):
                return float(line.rpartition(" ")[2])
        return 0.0


def prompt(num_tokens: int = LONG) -> Prompt:
    """One that begins unlike all others."""
    return SUBJECT.cut(11 * next(_STARTS), num_tokens)


def is_right(prompt: Prompt, reply: Reply) -> None:
    check(SUBJECT, prompt, reply)


def is_seen(
    nodes: Sequence[Node], state: str, is_over: Callable[[], bool], *, received: int = 0
) -> tuple[Node, Any] | None:
    """Until a request is in that state at one of them: where, and what it says of itself. None: it
    was over before anybody saw it, which may happen to whoever is slower than the servers."""
    found: list[tuple[Node, Any]] = []

    def look() -> bool:
        ended = is_over()
        for node in nodes:
            for request in node.requests():
                pages = request["handover"].get("received", 0)
                if request["state"] == state and pages >= received:
                    found.append((node, request))
        return ended or bool(found)

    wait_until(look, f"a request is {state}")
    return found[0] if found else None


def wait_used(decode: Node, prefill: Node, sources: list[str]) -> None:
    """Until it is asked and answers. It takes a moment to see that one is back; meanwhile requests
    get the right answer from elsewhere."""
    before = prefill.handover()["sent_pages"]

    def is_used() -> bool:
        reply = decode.ask(mine := prompt(300), prefill=sources)
        is_right(mine, reply)
        return bool(prefill.handover()["sent_pages"] > before)

    wait_until(is_used, "it is used again")


class Caught(NamedTuple):
    """Requests of which one is in the middle of its transfer, and will stay there: `sender`, its
    prefill server, stands still."""

    decode: Node
    sender: Node
    waiting: list[Future[Reply]]


def catch(
    decodes: Sequence[Node], prefills: Sequence[Node], start: Callable[[], list[Future[Reply]]]
) -> Caught:
    """`start` is called until one of its requests could be caught."""
    for _ in range(_MAX_TRIES):
        waiting = start()
        seen = is_seen(decodes, "transferring", partial(_are_done, waiting), received=1)
        if seen is not None:
            decode, request = seen
            for sender in (n for n in prefills if n.peer == request["handover"]["peer"]):
                sender.stop_engine()
                if _is_in_the_middle(decode, request["id"]):
                    return Caught(decode, sender, waiting)
                sender.resume_engine()
        for each in waiting:
            each.result()
    raise AssertionError("every transfer was over before it was seen")


def _are_done(waiting: list[Future[Reply]]) -> bool:
    return all(each.done() for each in waiting)


def _is_in_the_middle(decode: Node, name: str) -> bool:
    """More is missing than can be under way."""
    return any(
        request["id"] == name
        and request["state"] == "transferring"
        and request["handover"]["received"] < request["handover"]["wanted"] // 2
        for request in decode.requests()
    )


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Fleet]:
    options: dict[str, Any] = {
        "store": f"file://{folder}/store?max=256MiB",
        "prefetch_threshold": PAGE,
        "handover_timeout": 5,
    }
    prefills = [
        Node(folder / f"prefill-{i}", SUBJECT, role="prefill", chunk_tokens=PAGE, **options)
        for i in (1, 2)
    ]
    decodes = [
        Node(folder / f"decode-{i}", SUBJECT, role="decode", debug="true", **options)
        for i in (1, 2)
    ]
    with running(*prefills, *decodes):
        arguments = [*_named("--prefill", prefills), *_named("--decode", decodes)]
        with (
            Program(folder / "router", "route", "--port", "0", *arguments) as router,
            httpx.Client(base_url=router.url, timeout=TIMEOUT_S) as http,
        ):
            yield Fleet(prefills, decodes, router, http)


def _named(option: str, nodes: Sequence[Node]) -> list[str]:
    return [part for node in nodes for part in (option, node.url)]
