"""Links between prefill and decode that are cut, or stall, in the middle of a transfer (C28).

With real networks: namespaces and veth pairs, for which it takes root (skipped without; a server
that stands still is tried anywhere). After each: all is given back on both sides, a request that
has nobody left gets a clear error (the client's own patience is the bound), and what is mended is
used again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from e2e.disagg.fleet import SUBJECT, Fleet, catch, is_right, prompt, wait_used
from e2e.disagg.netns import Link, Network, why_not
from e2e.disagg.servers import Node, Reply, running
from e2e.exactness.subjects import PAGE, Prompt

HANDOVER_TIMEOUT_S = 4.0
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


BREAKS: dict[str, tuple[Callable[[Link], None], Callable[[Link], None]]] = {
    "cut": (Link.cut, Link.mend),
    "stalled": (Link.stall, Link.go_on),
}
every_break = pytest.mark.parametrize(
    "how", ["cut", pytest.param("stalled", marks=pytest.mark.long)]
)


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


def _break_while_transferring(rig: Rig, prefill: list[str], cut: Callable[[Node], None]) -> Reply:
    """The answer to a request whose link was broken in its middle. `cut` gets the prefill server,
    which stands still until then."""
    asked: list[Prompt] = []
    with ThreadPoolExecutor(1) as pool:

        def start() -> list[Future[Reply]]:
            asked.append(prompt())
            return [pool.submit(rig.decode.ask, asked[-1], NUM_TOKENS, prefill=prefill)]

        first = [node for node in rig.prefills if node.peer == prefill[0]]
        caught = catch([rig.decode], first, start)
        try:
            cut(caught.sender)
        finally:
            caught.sender.resume_engine()
        reply = caught.waiting[0].result()
    if reply.status == 200:
        is_right(asked[-1], reply)
    return reply


def local(decode: Node) -> int:
    """Prompts that it had to compute itself."""
    return int(sum(decode.handover()["local"].values()))


@every_break
def test_a_broken_link_and_nobody_left_decode_computes_until_it_is_mended_c28(
    rig: Rig, how: str
) -> None:
    break_link, mend = BREAKS[how]
    link, peer = rig.links[0], rig.peers[0]
    try:
        before = local(rig.decode)
        reply = _break_while_transferring(rig, [peer], lambda _: break_link(link))
        assert reply.status == 200, reply.message
        # Once more, without any connection to begin with.
        is_right(mine := prompt(), rig.decode.ask(mine, NUM_TOKENS, prefill=[peer]))
        assert local(rig.decode) == before + 2
        rig.settle()
    finally:
        mend(link)
    wait_used(rig.decode, rig.prefills[0], [peer])
    rig.settle()


@pytest.mark.long
@every_break
def test_a_broken_link_and_another_prefill_server_c28(rig: Rig, how: str) -> None:
    break_link, mend = BREAKS[how]
    link, other = rig.links[0], rig.prefills[1]
    before = other.handover()["sent_pages"]
    try:
        reply = _break_while_transferring(rig, rig.peers, lambda _: break_link(link))
        assert reply.status == 200, reply.message
        assert other.handover()["sent_pages"] > before
        # The next does not even try the broken one for long.
        mine = prompt(300)
        is_right(mine, rig.decode.ask(mine, NUM_TOKENS, prefill=rig.peers))
        rig.settle()
    finally:
        mend(link)
    wait_used(rig.decode, rig.prefills[0], rig.peers)
    rig.settle()


@pytest.mark.long
def test_a_link_that_stalls_for_a_moment_costs_only_time_c28(rig: Rig) -> None:
    """If it was only a moment: it takes as long as this machine takes for it."""
    link = rig.links[0]
    moments: list[float] = []

    def hiccup(sender: Node) -> None:
        began_s = time.monotonic()
        link.stall()
        sender.resume_engine()
        time.sleep(HANDOVER_TIMEOUT_S / 8)
        link.go_on()
        moments.append(time.monotonic() - began_s)

    for _ in range(10):
        reply = _break_while_transferring(rig, rig.peers[:1], hiccup)
        if moments[-1] < HANDOVER_TIMEOUT_S / 2:
            break
    assert reply.status == 200, reply.message
    rig.settle()


def test_a_prefill_server_that_stands_still_c28(fleet: Fleet) -> None:
    """Its sockets stay open, and nothing comes. For this there need be no namespaces."""
    decode, still = fleet.decodes[0], fleet.prefills[0]
    try:
        asked: list[Prompt] = []
        with ThreadPoolExecutor(1) as pool:

            def start() -> list[Future[Reply]]:
                asked.append(prompt())
                return [pool.submit(decode.ask, asked[-1], NUM_TOKENS, prefill=fleet.peers)]

            caught = catch([decode], [still], start)
            is_right(asked[-1], caught.waiting[0].result())
        is_right(mine := prompt(), decode.ask(mine, NUM_TOKENS, prefill=[still.peer]))
        decode.wait_clean()
    finally:
        still.resume_engine()
    wait_used(decode, still, [still.peer])
