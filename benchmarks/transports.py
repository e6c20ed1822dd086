"""Pages between two engines on one machine: over localhost and by NIXL, if it is installed, against
a plain socket that copies the same bytes; through shared memory, against a plain copy from memory
to memory.

    python benchmarks/transports.py

Over localhost both ends run in this process, on either side of the comparison; the plain socket
sends each page with sendall and receives it into its place, one connection, nothing checked. A
ratio of 1 would be pages with authentication, grants, statuses and checksums (computed twice) for
nothing. A plain copy has as many threads as the shared memory that is compared with it.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from quire.memory.host import HostPool
from quire.memory.page_layout import PageLayout
from quire.messages import PeerPart, PeerSource
from quire.peer.client import ClientLimits, PageClient
from quire.peer.identity import make_identity
from quire.peer.kinds import TransportKind
from quire.peer.nixl import NixlAgent
from quire.peer.region import Region
from quire.peer.server import PageServer
from quire.peer.tickets import Tickets
from quire.types import OperationId, PageStatus, page_ids

_EPOCH, _SECRET = "bench", "bench"
_GRANT = OperationId(1)
_TIMEOUT_S = 60.0

LAYOUTS = {
    "2 MiB": PageLayout("full", 32, 4, 128, "bfloat16", 32),
    "360 KiB": PageLayout("full", 30, 3, 64, "bfloat16", 16),
}


STREAMS = (1, 2, 4)
"""Connections that share one read; threads, of a copy."""


def run(*, total_bytes: int = 256 << 20, rounds: int = 5) -> dict[str, Any]:
    """GB/s of the fastest round, and the median over rounds of the ratio to what is plain."""
    return {name: _compare(layout, total_bytes, rounds) for name, layout in LAYOUTS.items()}


def _compare(layout: PageLayout, total_bytes: int, rounds: int) -> dict[str, Any]:
    num_pages = max(1, total_bytes // layout.page_bytes)
    size_bytes = num_pages * layout.page_bytes
    held, wanted = HostPool(layout, num_pages, is_shared=True), HostPool(layout, num_pages)
    np.frombuffer(held.raw().numpy(), dtype=np.uint8)[:] = 7
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        exchanges = {
            kind.value: stack.enter_context(_Exchange(held, wanted, kind)) for kind in _kinds()
        }
        for _ in range(rounds):
            seconds.setdefault("socket", []).append(_plain(held, wanted))
            for streams in STREAMS:
                ways = {"copy": _copied(held, wanted, streams)}
                ways |= {name: one.read(streams) for name, one in exchanges.items()}
                for way, took in ways.items():
                    seconds.setdefault(f"{way} {streams}", []).append(took)
    held.close()
    wanted.close()
    bases = {
        f"{name} {n}": f"copy {n}" if name == TransportKind.SHM else "socket"
        for name in exchanges
        for n in STREAMS
    }
    return {
        "pages": num_pages,
        "page_bytes": layout.page_bytes,
        "gb_per_s": {name: round(size_bytes / min(s) / 1e9, 2) for name, s in seconds.items()},
        "ratio_to_plain": {
            name: round(_median_ratio(seconds[base], seconds[name]), 2)
            for name, base in bases.items()
        },
    }


def _kinds() -> list[TransportKind]:
    """NIXL last, if there is one."""
    has_nixl = importlib.util.find_spec("nixl") is not None
    found = [TransportKind.TCP, TransportKind.SHM]
    return [*found, TransportKind.NIXL] if has_nixl else found


def _median_ratio(plain: list[float], found: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(plain, found, strict=True))


class _Exchange:
    """A page server over one pool, and clients that read into the other."""

    def __init__(self, held: HostPool, wanted: HostPool, kind: TransportKind) -> None:
        there, here = (
            NixlAgent() if kind is TransportKind.NIXL else None for _ in ("server", "client")
        )
        heads = held.layout.num_kv_heads
        identity = make_identity("bench", [held.layout], {held.layout.component: heads})
        self._region = Region(wanted, 0, heads)
        self._pages = range(held.num_pages)
        tickets = Tickets(b"bench")
        self._server = PageServer(
            "tcp://127.0.0.1:0",
            identity=identity,
            secret=_SECRET,
            epoch=_EPOCH,
            regions=[Region(held, 0, heads)],
            tickets=tickets,
            kind=kind,
            nixl=there,
        )
        self._server.grant(_GRANT, held.layout.component, page_ids(self._pages))
        part = PeerPart(self._server.address, 0, heads)
        self._source = PeerSource(_EPOCH, _GRANT, 0, [part], tickets.of(_GRANT))
        self._clients = {
            streams: PageClient(
                identity, _SECRET, kind=kind, limits=ClientLimits(streams=streams), nixl=here
            )
            for streams in STREAMS
        }
        for streams in self._clients:
            self.read(streams)  # connects

    def read(self, streams: int) -> float:
        started = time.perf_counter()
        statuses = self._clients[streams].read(
            self._source, self._region, self._pages, timeout_s=_TIMEOUT_S
        )
        took = time.perf_counter() - started
        if set(statuses) != {PageStatus.OK}:
            raise AssertionError("the benchmark's own server did not serve")
        return took

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()
        self._server.close()


def _copied(held: HostPool, wanted: HostPool, threads: int) -> float:
    """Seconds for the same pages, from memory to memory."""
    whole = 0, held.layout.num_kv_heads
    ours, theirs = Region(wanted, *whole), Region(held, *whole)

    def copy(first: int) -> None:
        for page in range(first, held.num_pages, threads):
            ours.copy_from(theirs, page, page, *whole)

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(copy, range(threads)))
        return time.perf_counter() - started


def _plain(held: HostPool, wanted: HostPool) -> float:
    """Seconds for the same pages, one after the other, over a bare socket."""
    page_bytes = held.layout.page_bytes
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = socket.create_connection(listener.getsockname())
        sender, _ = listener.accept()
    with sender, receiver:

        def send() -> None:
            for page in range(held.num_pages):
                sender.sendall(held.page_view(page)[:page_bytes])

        thread = threading.Thread(target=send, name="quire-bench-plain")
        started = time.perf_counter()
        thread.start()
        for page in range(wanted.num_pages):
            view = wanted.page_view(page)[:page_bytes]
            while view.nbytes:
                view = view[receiver.recv_into(view) :]
        took = time.perf_counter() - started
        thread.join()
    return took


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
