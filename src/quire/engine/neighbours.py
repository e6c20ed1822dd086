"""An engine among others: what its ranks serve pages with, and its part in the exchange.

Knows configuration and puts things together; how pages are asked for and given is quire.disagg's.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.disagg.config import ReceiverConfig
from quire.disagg.exchange import Exchange
from quire.disagg.giving import Giver, Handout, describe_handout
from quire.disagg.handover import Handover, describe
from quire.disagg.receiving import Receiver
from quire.engine.config import EngineConfig, Role
from quire.engine.handovers import Handovers, Prefills
from quire.engine.layouts import RECURRENT
from quire.engine.messages import EngineInfo, Handed
from quire.engine.parallel import head_share
from quire.engine.queue import Queue
from quire.engine.scheduler import Scheduler
from quire.manager import CacheManager
from quire.memory.page_layout import PageLayout
from quire.messages import PeerPart
from quire.models import ModelShape
from quire.peer.address import join_address
from quire.peer.hub import Hello, PeerHub
from quire.peer.identity import Identity, make_identity
from quire.peer.tickets import Tickets
from quire.worker import PeerServing

logger = logging.getLogger("quire.handover")


class EnginePeering:
    """What is decided before the ranks are built."""

    def __init__(
        self, config: EngineConfig, shape: ModelShape, layouts: Sequence[PageLayout], weights: str
    ) -> None:
        self._config = config
        self._shape = shape
        self._epoch = secrets.token_hex(8)
        self._ticket_key = secrets.token_bytes(32)
        self.handed: list[Handed] = []
        """Hand-overs that have ended and that somebody wants to hear of."""
        heads = {layout.component: shape.num_kv_heads for layout in layouts}
        self._components = list(heads)
        self._identity: Identity = make_identity(weights, layouts, heads | {RECURRENT: 1})

    @classmethod
    def of(
        cls, config: EngineConfig, shape: ModelShape, layouts: Sequence[PageLayout], weights: str
    ) -> EnginePeering | None:
        """None: the engine keeps to itself."""
        if config.peer_port is None and not config.peers:
            return None
        return cls(config, shape, layouts, weights)

    def serving(self, rank: int) -> PeerServing:
        config = self._config
        first, last = head_share(self._shape, rank, config.tp)
        heads = dict.fromkeys(self._components, (first, last))
        if RECURRENT in heads:
            heads[RECURRENT] = (0, 1)
        return PeerServing(
            secret=config.peer_secret,
            epoch=self._epoch,
            identity=self._identity,
            heads=heads,
            host=config.peer_host,
            port=config.peer_port + 1 + rank if config.peer_port else 0,
            ticket_key=self._ticket_key,
            transport=config.peer_transport,
        )

    def open(self, queue: Queue, manager: CacheManager, addresses: Sequence[str]) -> Neighbours:
        """Listen for others, and connect to those named. `addresses`: of the ranks' page servers.
        Raises ConfigError when it cannot listen."""
        config = self._config
        parts = [
            PeerPart(address, *head_share(self._shape, rank, config.tp))
            for rank, address in enumerate(addresses)
        ]
        listen = None
        if config.peer_port is not None:
            listen = join_address("tcp", config.peer_host, config.peer_port)
        hello = Hello(self._identity, self._epoch, config.role.value, parts)
        hub = PeerHub(hello, config.peer_secret, listen=listen, transport=config.peer_transport)
        receiver = Receiver(
            manager,
            hub,
            name=self._epoch,
            clock=time.monotonic,
            config=ReceiverConfig(
                timeout_s=config.handover_timeout_s,
                local_pages=config.decode_computes // config.page_size,
            ),
            room=lambda: manager.config.device_pages - queue.used_pages(),
            on_end=self._received,
        )
        return Neighbours(hub, receiver, self._remote(receiver, manager))

    def _remote(self, receiver: Receiver, manager: CacheManager) -> Handovers | None:
        config = self._config
        decode = config.role is Role.DECODE
        if not decode and not config.peers:
            return None
        return Handovers(
            receiver,
            manager,
            prefill=config.prefill,
            peers=config.peers,
            decode=decode,
            restore=config.decode_restore or not decode,
        )

    def join(
        self, others: Neighbours, scheduler: Scheduler, manager: CacheManager, info: EngineInfo
    ) -> Exchange:
        """Compute for others, too."""
        prefills = Prefills(scheduler, info, clock=time.monotonic)
        computing = self._config.role is not Role.DECODE
        giver = Giver(
            manager,
            prefills,
            clock=time.monotonic,
            send=others.hub.send,
            computing=computing,
            ticket=Tickets(self._ticket_key).of,
            on_end=self._gave,
        )
        return Exchange(others.hub, others.receiver, giver)

    def _received(self, handover: Handover) -> None:
        """One line for each hand-over that asked somebody for something, or brought something
        back."""
        if not handover.tries and not (handover.match and handover.match.needs_restore):
            return
        now, trace = time.monotonic(), handover.prompt.trace
        about = describe(handover, now)
        logger.info(
            "hand-over of %s from %s%s: %s; %s pages brought back here, %s received, in %s s",
            *(about["request"], about["peer"], f" as {about['id']}" if about["id"] else ""),
            *(about[name] for name in ("stage", "restored", "received", "seconds")),
            extra={"fields": {"event": "handover"} | about},
        )
        self.handed.append(Handed(trace, False, handover.began_s, now, about))

    def _gave(self, handout: Handout) -> None:
        """The line of the other side."""
        now, trace = time.monotonic(), handout.ask.trace
        about = describe_handout(handout, now)
        logger.info(
            "hand-over to %s as %s: pages %s to %s, %s, in %s s",
            *(about[name] for name in ("peer", "id", "first", "last")),
            "all given" if handout.completed else "ended before all were given",
            about["seconds"],
            extra={"fields": {"event": "handout"} | about},
        )
        self.handed.append(Handed(trace, True, handout.began_s, now, about))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The way to other engines, before anything is computed for them."""

    hub: PeerHub
    receiver: Receiver
    remote: Handovers | None
    """None: nothing is asked of others."""
