"""Who gets room for what a peer is to send, and when."""

from __future__ import annotations

from quire.disagg.asker import Asker
from quire.disagg.handover import Prompt, Stage
from quire.peer.messages import PeerMessage
from support import Rig


class NoLinks:
    """Nobody is reached."""

    def connect(self, address: str) -> None:
        pass

    def send(self, link: str, message: PeerMessage) -> bool:
        return False


def test_room_is_given_in_the_order_of_arrival_c46() -> None:
    """A small one that comes later does not overtake: it would do so again and again."""
    rig = Rig(store=False)
    asker = Asker(rig.manager, NoLinks(), name="a", clock=lambda: rig.now, room=lambda: 10)
    handovers = []
    for seed, pages in enumerate((6, 6, 2), 1):
        lease = rig.acquire(rig.doc(pages, seed=seed))
        prompt = Prompt(lease.key.tokens.tobytes())
        handovers.append(asker.begin(f"r{seed}", lease, prompt, ["tcp://p:1"], restore=False))
    asker.advance()
    assert [h.stage for h in handovers] == [Stage.MOVING, Stage.QUEUED, Stage.QUEUED]
    asker.cancel(handovers[0])
    asker.advance()
    assert [h.stage for h in handovers[1:]] == [Stage.MOVING, Stage.MOVING]
