"""Bytes: one rank's host pages to another rank's device, by each transport, beside a plain copy.

Two real workers on this machine, without engines: one serves its host pages, the other fetches them
into its own and loads them to its device as they come, as in a hand-over. The clock runs from the
first command to the last layer of the last page; what has arrived is compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch

from quire.errors import EngineError
from quire.memory.page_layout import PageLayout
from quire.messages import Cancel, Fetch, Load, PeerPart, PeerSource, Serve, Transferred
from quire.peer.identity import make_identity
from quire.peer.kinds import TransportKind
from quire.peer.tickets import Tickets
from quire.types import OperationId, PageStatus, page_ids
from quire.worker import ComponentConfig, WorkerConfig, build_worker
from quire.worker.config import PeerServing
from quire.worker.worker import CacheWorker

_SECRET, _EPOCH, _KEY = "only for a benchmark of bytes", "bench", b"bench"
_TIMEOUT_S = 60.0
_LOAD_PAGES = 8
"""Loaded together, at least, unless they are the last."""
_POLL_S = 0.0002


@dataclass(frozen=True, slots=True)
class Plan:
    layout: PageLayout
    num_pages: int
    device: str = "cpu"
    rounds: int = 4
    offer_pages: int = 32
    """Of each fetch."""


def measure(plan: Plan, kinds: Sequence[TransportKind]) -> dict[str, Any]:
    """By transport, bytes a second of the fastest round. Raises EngineError if a page is wrong."""
    size_bytes = plan.num_pages * plan.layout.page_bytes
    found = {}
    for kind in kinds:
        with closing(_worker(plan, kind)) as giver, closing(_worker(plan, kind)) as reader:
            seconds = [_round(plan, giver, reader, number) for number in range(plan.rounds)]
        found[kind.value] = {
            "bytes": size_bytes,
            "seconds": seconds,
            "bytes_s": size_bytes / min(seconds),
        }
    return found


def _worker(plan: Plan, kind: TransportKind) -> CacheWorker:
    layout = plan.layout
    heads = layout.num_kv_heads
    identity = make_identity("bench", [layout], {layout.component: heads})
    return build_worker(
        WorkerConfig(
            rank=0,
            num_ranks=1,
            model_fingerprint="bench",
            components=[ComponentConfig(layout, plan.num_pages, plan.num_pages)],
            device=plan.device,
            peer=PeerServing(
                secret=_SECRET,
                epoch=_EPOCH,
                identity=identity,
                heads={layout.component: (0, heads)},
                ticket_key=_KEY,
                transport=kind,
            ),
        )
    )


def _round(plan: Plan, giver: CacheWorker, reader: CacheWorker, number: int) -> float:
    layout, ops = plan.layout, count(1000 * number)
    theirs = giver.components[layout.component].host
    ours = reader.components[layout.component].device
    pages = np.arange(plan.num_pages)
    for page in range(plan.num_pages):
        np.frombuffer(theirs.page_view(page), dtype=np.uint8)[:] = (page * 7 + number) % 251
    grant = OperationId(next(ops))
    giver.submit([Serve(grant, layout.component, page_ids(pages))])
    part = PeerPart(giver.peer_address, 0, layout.num_kv_heads)
    began = time.perf_counter()
    _bring(plan, reader, ops, grant, part)
    took = time.perf_counter() - began
    giver.submit([Cancel(grant)])
    while giver.busy:
        giver.poll()
        time.sleep(_POLL_S)
    expected = torch.from_numpy((pages * 7 + number) % 251)[:, None]
    for layer in range(layout.num_layers):
        for plane in ours.planes(layer):
            ends = plane.reshape(plan.num_pages, -1).view(torch.uint8)[:, [0, -1]].cpu()
            if not bool((ends == expected).all()):
                raise EngineError("pages arrived wrong")
    return took


def _bring(
    plan: Plan, reader: CacheWorker, ops: Iterator[int], grant: OperationId, part: PeerPart
) -> None:
    """All pages of the grant, to the device. Raises EngineError if some do not come."""
    name, ticket = plan.layout.component, Tickets(_KEY).of(grant)
    fetches: dict[OperationId, int] = {}
    for first in range(0, plan.num_pages, plan.offer_pages):
        host = page_ids(range(first, min(first + plan.offer_pages, plan.num_pages)))
        op = OperationId(next(ops))
        fetches[op] = first
        source = PeerSource(_EPOCH, grant, first, [part], ticket)
        reader.submit([Fetch(op, name, b"", host, _TIMEOUT_S, source)])
    come: list[int] = []
    loads = num_loaded = 0
    while num_loaded < plan.num_pages:
        for report in reader.poll():
            assert isinstance(report, Transferred)
            if set(report.statuses) - {PageStatus.OK}:
                raise EngineError(f"pages did not come: {set(report.statuses)}")
            if report.op in fetches:
                begin = fetches[report.op] + report.first
                come += range(begin, begin + len(report.statuses))
            else:
                num_loaded += len(report.statuses)
        if len(come) >= _LOAD_PAGES or (come and loads + len(come) == plan.num_pages):
            reader.submit([Load(OperationId(next(ops)), name, page_ids(come), page_ids(come))])
            loads, come = loads + len(come), []
        time.sleep(_POLL_S)
