"""Links between prefill and decode that are cut, or stall, in the middle of a transfer (C28).

With real networks: namespaces and veth pairs, for which it takes root (skipped without; a server
that stands still is tried anywhere). After each: all is given back on both sides, a request that
has nobody left gets a clear error in bounded time, and what is mended is used again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from e2e.disagg.fleet import SUBJECT, Fleet, is_right, prompt, wait_for
from e2e.disagg.netns import Link, Network, why_not
from e2e.disagg.servers import Node, Reply, running
from e2e.exactness.subjects import PAGE
from e2e.serving.server import wait_until

HANDOVER_TIMEOUT_S = 1.0
BOUND_S = 30.0
"""Two rounds of waiting, for the transfer and for a connection; and a slow machine."""
NUM_TOKENS = 12


class Rig:
    """Decode in one network, prefill servers in others, each with a link of its own."""

    def __init__(self, decode: Node, prefills: list[Node], links: list[Link]) -> None:
        self.decode = decode
        self.prefills = prefills
        self.links = links

    @property
    def peers(self) -> list[str]:
        return [node.peer for node in self.prefills]

    def settle(self) -> None:
        """The holder's patience is twice the asker's."""
        for node in (self.decode, *self.prefills):
            node.wait_clean()

    def wait_used(self, prefill: Node, sources: list[str]) -> None:
        """Until it is asked and answers. TCP takes a moment to see that a link is back; meanwhile
        requests get the right answer from elsewhere, or a clear error."""
        before = prefill.handover()["sent_pages"]

        def is_used() -> bool:
            reply = self.decode.ask(mine := prompt(300), NUM_TOKENS, prefill=sources)
            if reply.status == 200:
                is_right(mine, reply)
            else:
                assert reply.error["code"] == "handover_failed"
            return reply.status == 200 and bool(prefill.handover()["sent_pages"] > before)

        wait_until(is_used, "it is used again")


BREAKS: dict[str, tuple[Callable[[Link], None], Callable[[Link], None]]] = {
    "cut": (Link.cut, Link.mend),
    "stalled": (Link.stall, Link.go_on),
}
every_break = pytest.mark.parametrize("how", BREAKS)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("links")
    with contextlib.ExitStack() as stack:
        here, *there = (stack.enter_context(Network()) for _ in range(3))
        links = [Link(here, each) for each in there]
        decode = Node(
            folder / "decode",
            SUBJECT,
            where=here.inside,
            role="decode",
            handover_timeout=HANDOVER_TIMEOUT_S,
            admin_key_file=folder / "decode.key",
        )
        prefills = [
            Node(
                folder / f"prefill-{i}",
                SUBJECT,
                where=network.inside,
                role="prefill",
                peer_host=link.right,
                chunk_tokens=PAGE,
                admin_key_file=folder / f"prefill-{i}.key",
            )
            for i, (network, link) in enumerate(zip(there, links, strict=True))
        ]
        stack.enter_context(running(decode, *prefills))
        yield Rig(decode, prefills, links)


def _break_while_transferring(
    rig: Rig, prefill: list[str], cut: Callable[[], None]
) -> Future[Reply]:
    """The request, and the link broken in its middle."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.decode.ask, mine := prompt(), NUM_TOKENS, prefill=prefill)
        _, request = wait_for([rig.decode], "transferring", received=1)
        assert request["handover"]["peer"] == prefill[0]
        cut()
    reply = waiting.result()
    if reply.status == 200:
        is_right(mine, reply)
    return waiting


@every_break
def test_a_broken_link_and_nobody_left_then_mended_c28(rig: Rig, how: str) -> None:
    break_link, mend = BREAKS[how]
    link, peer = rig.links[0], rig.peers[0]
    try:
        reply = _break_while_transferring(rig, [peer], lambda: break_link(link)).result()
        assert (reply.status, reply.error["code"]) == (503, "handover_failed")
        assert peer in reply.message
        assert reply.seconds < BOUND_S
        # Once more, without any connection to begin with.
        reply = rig.decode.ask(prompt(), NUM_TOKENS, prefill=[peer])
        assert (reply.status, reply.error["code"]) == (503, "handover_failed")
        assert reply.seconds < BOUND_S
        rig.settle()
    finally:
        mend(link)
    rig.wait_used(rig.prefills[0], [peer])
    rig.settle()


@every_break
def test_a_broken_link_and_another_prefill_server_c28(rig: Rig, how: str) -> None:
    break_link, mend = BREAKS[how]
    link, other = rig.links[0], rig.prefills[1]
    before = other.handover()["sent_pages"]
    try:
        reply = _break_while_transferring(rig, rig.peers, lambda: break_link(link)).result()
        assert reply.status == 200, reply.message
        assert other.handover()["sent_pages"] > before
        # The next does not even try the broken one for long.
        mine = prompt(300)
        is_right(mine, rig.decode.ask(mine, NUM_TOKENS, prefill=rig.peers))
        rig.settle()
    finally:
        mend(link)
    rig.wait_used(rig.prefills[0], rig.peers)
    rig.settle()


def test_a_link_that_stalls_for_a_moment_costs_only_time_c28(rig: Rig) -> None:
    link = rig.links[0]

    def hiccup() -> None:
        link.stall()
        time.sleep(HANDOVER_TIMEOUT_S / 4)
        link.go_on()

    reply = _break_while_transferring(rig, rig.peers[:1], hiccup).result()
    assert reply.status == 200, reply.message
    rig.settle()


def test_a_prefill_server_that_stands_still_c28(fleet: Fleet) -> None:
    """Its sockets stay open, and nothing comes. For this there need be no namespaces."""
    decode, still = fleet.decodes[0], fleet.prefills[0]
    try:
        with ThreadPoolExecutor(1) as pool:
            mine = prompt()
            waiting = pool.submit(decode.ask, mine, NUM_TOKENS, prefill=fleet.peers)
            wait_for([decode], "transferring", received=1)
            still.stop_engine()
            is_right(mine, waiting.result())
        reply = decode.ask(prompt(), NUM_TOKENS, prefill=[still.peer])
        assert (reply.status, reply.error["code"]) == (503, "handover_failed")
        assert reply.seconds < BOUND_S
        decode.wait_clean()
    finally:
        still.resume_engine()
    wait_until(lambda: decode.handover()["links"][still.peer] == "connected", "it is found again")
    mine = prompt(300)
    is_right(mine, decode.ask(mine, NUM_TOKENS, prefill=[still.peer]))
