"""Runs in vLLM's own environment: hears cache events with vLLM's classes, and says what is held.

    subscriber.py PUB REPLAY        then a line on standard input: what is held now, as one of JSON

As vLLM's documentation has subscribers do it: SUB for what comes, REPLAY for what was missed, from
its number on, until vLLM's own END_SEQ. Knows nothing of Quire.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import msgspec
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

_QUIET_MS = 500


class Subscriber:
    def __init__(self, events: str, replay: str) -> None:
        context = zmq.Context()
        self._sub = context.socket(zmq.SUB)
        self._sub.connect(events)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._next = 0
        self.num_replayed = 0
        self.held: dict[str, set[str]] = defaultdict(set)
        self.tokens: dict[str, list[int]] = {}
        """Of a block, with those before it."""

    def hear(self) -> None:
        """All that has come, and what was missed before it; from the beginning at first."""
        self._ask_again()
        while self._sub.poll(_QUIET_MS):
            _topic, number, payload = self._sub.recv_multipart()
            if int.from_bytes(number, "big") > self._next:
                self._ask_again()
            self._take(int.from_bytes(number, "big"), payload)

    def _ask_again(self) -> None:
        self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            _gap, _topic, number, payload = self._replay.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return
            self.num_replayed += 1
            self._take(int.from_bytes(number, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number < self._next:
            return  # it came both ways
        assert number == self._next, f"{number} follows {self._next - 1}"
        self._next += 1
        for event in self._decoder.decode(payload).events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved(block_hashes=hashes, medium=medium):
                    names = {each.hex() for each in hashes}
                    assert names <= self.held[medium], "removed without being there"
                    self.held[medium] -= names
                case AllBlocksCleared():
                    self.held.clear()

    def _stored(self, event: BlockStored) -> None:
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        before: list[int] = []
        if event.parent_block_hash is not None:
            before = self.tokens.get(event.parent_block_hash.hex(), [])
        for at, each in enumerate(event.block_hashes):
            before = before + event.token_ids[at * event.block_size : (at + 1) * event.block_size]
            self.tokens[each.hex()] = before
            self.held[event.medium].add(each.hex())


def main() -> None:
    subscriber = Subscriber(*sys.argv[1:])
    print("ready", flush=True)
    for _ in sys.stdin:
        subscriber.hear()
        found = {
            "held": {medium: sorted(names) for medium, names in subscriber.held.items() if names},
            "tokens": subscriber.tokens,
            "replayed": subscriber.num_replayed,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
