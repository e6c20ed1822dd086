"""Cache events in vLLM's format: read by its published structure, numbered, to be had again."""

from typing import Any

import msgspec
import pytest
import zmq

from quire.engine.kvevents.config import Publishing
from quire.engine.kvevents.publisher import EventPublisher
from quire.errors import ConfigError
from quire.manager import CacheEvent, EventBatch, EventKind

WAIT_MS = 60_000
KEYS = b"a" * 32 + b"b" * 32
STORED = CacheEvent(
    EventKind.STORED, "host", "full", KEYS, b"p" * 32, b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0"
)
REMOVED = CacheEvent(EventKind.REMOVED, "device", "full", KEYS[:32])
WINDOW = CacheEvent(EventKind.STORED, "device", "window", KEYS)


# As vLLM 0.32 publishes its structures, fields in its order.
class Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def decoder():
    """vLLM's own, where it is installed."""
    try:
        from vllm.distributed.kv_events import KVEventBatch
    except ModuleNotFoundError:  # a folder of tests has that name too
        return msgspec.msgpack.Decoder(Batch)

    return msgspec.msgpack.Decoder(KVEventBatch)


class Sockets:
    """Of one context; closed together."""

    def __init__(self):
        self._context = zmq.Context()
        self._open = []

    def socket(self, kind):
        self._open.append(self._context.socket(kind))
        return self._open[-1]

    def close(self):
        self._context.destroy(linger=0)


@pytest.fixture
def context():
    sockets = Sockets()
    yield sockets
    sockets.close()


@pytest.fixture
def publisher():
    publishing = Publishing("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@here")
    publisher = EventPublisher(publishing, 2, now=lambda: 12.5, kept_batches=3)
    yield publisher
    publisher.close()


def nothing():
    raise AssertionError("nothing was lost")


def subscribe(context, publisher):
    """Connected, and sure to hear of what follows."""
    listener = context.socket(zmq.SUB)
    listener.setsockopt(zmq.SUBSCRIBE, b"kv@")
    listener.connect(publisher.address)
    listener.setsockopt(zmq.RCVTIMEO, 20)
    while True:
        publisher.publish(EventBatch([REMOVED], 0), nothing)
        try:
            frames = listener.recv_multipart()
        except zmq.Again:
            continue
        listener.setsockopt(zmq.RCVTIMEO, 200)
        try:
            while True:
                frames = listener.recv_multipart()
        except zmq.Again:
            listener.setsockopt(zmq.RCVTIMEO, WAIT_MS)
            return listener, int.from_bytes(frames[1], "big") + 1


def test_a_subscriber_reads_what_was_stored_and_removed(context, publisher):
    listener, first = subscribe(context, publisher)
    publisher.publish(EventBatch([], 0), nothing)
    publisher.publish(EventBatch([WINDOW], 0), nothing)  # neither is worth a message
    publisher.publish(EventBatch([STORED, REMOVED, WINDOW], 0), nothing)
    publisher.publish(EventBatch([REMOVED], 0), nothing)
    topic, number, payload = listener.recv_multipart()
    assert (topic, int.from_bytes(number, "big")) == (b"kv@here", first)
    batch = decoder().decode(payload)
    stored, removed = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    assert stored.block_hashes == [b"a" * 32, b"b" * 32]
    assert stored.parent_block_hash == b"p" * 32
    assert (stored.token_ids, stored.block_size, stored.medium) == ([1, 2, 3, 4], 2, "CPU")
    assert (removed.block_hashes, removed.medium) == ([b"a" * 32], "GPU")
    assert int.from_bytes(listener.recv_multipart()[1], "big") == first + 1


def test_what_was_lost_is_told_from_the_beginning(context, publisher):
    listener, _ = subscribe(context, publisher)
    publisher.publish(EventBatch([REMOVED], 2), lambda: [STORED])
    cleared, stored = decoder().decode(listener.recv_multipart()[2]).events
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert stored.block_hashes == [b"a" * 32, b"b" * 32]


def test_what_was_missed_can_be_had_again(context, publisher):
    _, first = subscribe(context, publisher)
    for _ in range(2):
        publisher.publish(EventBatch([STORED], 0), nothing)
    # A REQ takes one answer; as many come as are kept.
    asking = context.socket(zmq.DEALER)
    asking.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    asking.connect(publisher.replay_address)
    asking.send_multipart([b"", b"too short"])
    asking.send_multipart([b"", first.to_bytes(8, "big")])
    numbers = []
    while True:
        _, topic, number, payload = asking.recv_multipart()  # vLLM 0.32's frames
        if number == b"\xff" * 8:
            assert (topic, payload) == (b"", b"")
            break
        assert topic == b"kv@here"
        numbers.append(int.from_bytes(number, "big"))
        assert decoder().decode(payload).events
    assert numbers == [first, first + 1]


def test_an_address_that_is_none_is_refused():
    for address in ("nonsense", "tcp://nowhere.invalid:1", "tcp://127.0.0.1"):
        with pytest.raises(ConfigError, match="kv_events: cannot listen"):
            EventPublisher(Publishing(address), 2)


def test_nobody_need_listen_and_closing_twice_is_no_matter():
    publisher = EventPublisher(Publishing("tcp://127.0.0.1:*"), 2)
    for _ in range(100):
        publisher.publish(EventBatch([STORED], 0), nothing)
    publisher.close()
    publisher.close()
    assert publisher.replay_address == ""
