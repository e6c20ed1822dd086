"""Those who do not belong together say so, and go on serving those who do.

Wrong secret, other weights, other page size, other format version, and bytes that mean nothing: in
both directions, with a real server on one side.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from e2e.disagg.fleet import SUBJECT, Fleet, is_right, prompt
from e2e.disagg.servers import SECRET, Node, model_of
from e2e.exactness.subjects import PAGE, TINY_SUBJECTS
from e2e.serving.server import wait_until
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig, Role
from quire.engine.engine import Engine
from quire.peer.hub import Disconnected, Hello, HubEvent, PeerHub
from quire.peer.identity import Identity

NUM_TOKENS = 12
OTHER = next(subject for subject in TINY_SUBJECTS if subject.name == "gpt_oss")

STRANGERS: dict[str, tuple[dict[str, Any], str]] = {
    "secret": ({"peer_secret": "another secret, as long"}, "secret"),
    "model": ({}, "serve the same model files on both sides"),
    "page_size": ({"page_size": 2 * PAGE}, "set the same page_size on both sides"),
}
"""Options of an engine that differ, and what is said about it."""


@pytest.mark.parametrize("what", STRANGERS)
def test_a_prefill_engine_that_does_not_belong_here(fleet: Fleet, what: str) -> None:
    options, said = STRANGERS[what]
    if what == "model":
        options = {"model": str(model_of(OTHER))}
    with _engine(options) as engine:
        _check_refused(fleet, engine.info.peer, said)


def test_a_prefill_engine_of_another_version(fleet: Fleet) -> None:
    with _hub(lambda identity: {"version": identity.version + 1}, listen=True) as hub:
        _check_refused(fleet, hub.address, "run the same version of Quire on both sides")


def _check_refused(fleet: Fleet, address: str, said: str) -> None:
    """An administrator is told why; the client gets its answer, which decode computes."""
    decode = fleet.decodes[0]
    is_right(mine := prompt(200), decode.ask(mine, NUM_TOKENS, prefill=[address]))
    assert said in decode.handover()["links"][address]
    is_right(mine, decode.ask(mine, NUM_TOKENS, prefill=[address, *fleet.peers]))


CARDS: dict[str, tuple[Callable[[Identity], dict[str, Any]], str, str]] = {
    "secret": (lambda _: {}, "another secret, as long", "secret"),
    "model": (lambda _: {"model_fingerprint": "f" * 32}, SECRET, "the same model files"),
    "page_size": (lambda identity: {"page_size": 2 * identity.page_size}, SECRET, "page_size"),
    "version": (lambda identity: {"version": identity.version + 1}, SECRET, "the same version"),
}


@pytest.mark.parametrize("what", CARDS)
def test_a_decode_engine_that_does_not_belong_here(fleet: Fleet, what: str) -> None:
    """A prefill server lets nobody in whom its pages are not for, and says why."""
    change, secret, said = CARDS[what]
    prefill, decode = fleet.prefills[0], fleet.decodes[0]
    with _hub(change, secret=secret) as hub:
        hub.connect(prefill.peer)
        events: list[HubEvent] = []

        def has_heard() -> bool:
            events.extend(hub.poll())
            return bool(events)

        wait_until(has_heard, "it hears something")
        assert isinstance(events[0], Disconnected)
        assert said in events[0].reason
    is_right(mine := prompt(200), decode.ask(mine, NUM_TOKENS, prefill=[prefill.peer]))


NOISE: dict[str, bytes] = {
    "random": random.Random(5).randbytes(100_000),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(64),
    "long frame": b"\xff" * 8 + bytes(16),
    "half a frame": b"\x10\x00",
    "nothing": b"",
}


def test_noise_on_every_port_of_living_servers(fleet: Fleet) -> None:
    prefill, decode = fleet.prefills[0], fleet.decodes[0]
    with contextlib.ExitStack() as stack:
        visitors = []
        for node in (prefill, decode):
            ports = _peer_ports(node)
            assert urlsplit(node.peer).port in ports
            assert len(ports) == 2, "the leader's, and that of its one rank's pages"
            for port, data in itertools.product(ports, NOISE.values()):
                visitor = socket.create_connection(("127.0.0.1", port), timeout=30)
                visitors.append(stack.enter_context(visitor))
                with contextlib.suppress(ConnectionError):  # it need not listen to all of it
                    visitor.sendall(data)
        # While they are there …
        is_right(mine := prompt(200), decode.ask(mine, NUM_TOKENS, prefill=[prefill.peer]))
        # … and they are all shown the door, the silent ones too.
        for visitor in visitors:
            with contextlib.suppress(ConnectionError):
                while visitor.recv(4096):
                    pass
    is_right(mine := prompt(200), decode.ask(mine, NUM_TOKENS, prefill=[prefill.peer]))
    for node in (prefill, decode):
        assert not node.ended
        assert "Traceback" not in node.log


def _peer_ports(node: Node) -> set[int]:
    """All that its engine listens on."""
    return {
        connection.laddr.port
        for connection in node.engine.net_connections("tcp")
        if connection.status == "LISTEN"
    }


@contextlib.contextmanager
def _engine(options: dict[str, Any]) -> Iterator[Engine]:
    """A prefill engine in this process, like the servers' but for `options`."""
    given: dict[str, Any] = {
        "model": str(model_of(SUBJECT)),
        "name": "stranger",
        "page_size": PAGE,
        "device_bytes": 8 << 20,
        "host_bytes": 16 << 20,
        "role": Role.PREFILL,
        "peer_port": 0,
        "peer_secret": SECRET,
    }
    engine = build_engine(EngineConfig(**given | options))
    try:
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def _hub(
    change: Callable[[Identity], dict[str, Any]], *, secret: str = SECRET, listen: bool = False
) -> Iterator[PeerHub]:
    """A leader's line, of one that is like ours but for `change`."""
    identity = _identity()
    different = msgspec.structs.replace(identity, **change(identity))
    hello = Hello(different, "an epoch of its own", Role.PREFILL.value)
    hub = PeerHub(hello, secret, listen="tcp://127.0.0.1:0" if listen else None)
    try:
        yield hub
    finally:
        hub.close()


@cache
def _identity() -> Identity:
    """The servers' own: an engine of the same options has the same."""
    with _engine({}) as engine:
        assert engine.exchange is not None
        identity: Identity = engine.exchange.hub._hello.identity  # type: ignore[attr-defined]
        return identity
