"""Packed pages: what comes back is what went in, and a damaged one never passes."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest

from quire.cli.store import explain
from quire.errors import StoreURLError
from quire.store import maintenance
from quire.store.base import HEADER_BYTES, Part
from quire.store.codec import Mismatch, check_packed, object_name, open_header, unpack_in_place
from quire.store.memory import MemoryStore
from quire.store.packing import Packer, Packing, PackKind, unpack
from quire.types import PageStatus
from unit.store.conftest import counted

OK, MISS, CORRUPT = PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT
PAGE_BYTES = 16 * HEADER_BYTES
PART = Part("full", 0, 1, b"f" * 32, PAGE_BYTES)
KINDS = [PackKind.ZSTD, PackKind.LZ4]


@pytest.fixture(params=KINDS, ids=str)
def packer(request):
    pytest.importorskip({"zstd": "zstandard", "lz4": "lz4.block"}[request.param])
    return Packer(request.param)


def like_keys_and_values(seed: int = 0, dtype=np.float32) -> memoryview:
    """Numbers of alike size: their high bytes repeat."""
    numbers = np.random.default_rng(seed).normal(size=PAGE_BYTES // 4).astype(np.float32)
    if dtype == "bfloat16":
        twice = np.random.default_rng(seed).normal(size=PAGE_BYTES // 2).astype(np.float32)
        return memoryview(bytearray((twice.view(np.uint32) >> 16).astype(np.uint16).tobytes()))
    return memoryview(bytearray(numbers.astype(dtype).tobytes()))


def noise(seed: int = 0) -> memoryview:
    return memoryview(bytearray(np.random.default_rng(seed).bytes(PAGE_BYTES)))


def put(store, page, key=b"k" * 32):
    return store.put(PART, [key], [page], deadline=time.monotonic() + 60)


def get(store, key=b"k" * 32):
    page = memoryview(bytearray(PAGE_BYTES))
    return store.get(PART, [key], [page], deadline=time.monotonic() + 60)[0], page


@pytest.mark.parametrize("dtype", [np.float32, "bfloat16"])
def test_what_was_packed_comes_back_and_takes_less_room(packer, client, dtype):
    backend = MemoryStore()
    store = client(backend, packer=packer)
    page = like_keys_and_values(dtype=dtype)
    assert put(store, page) == [OK]
    assert get(store) == (OK, page)
    (stored,) = backend.scan()
    assert stored.size_bytes < HEADER_BYTES + PAGE_BYTES
    assert stored.size_bytes % HEADER_BYTES == 0
    counted = store.counters()
    assert counted["packed_bytes"] == stored.size_bytes - HEADER_BYTES
    assert counted["written_bytes"] == PAGE_BYTES


def test_what_does_not_pack_is_stored_as_it_is(packer, client):
    backend = MemoryStore()
    store = client(backend, packer=packer)
    assert put(store, noise()) == [OK]
    assert get(store) == (OK, noise())
    assert [item.size_bytes for item in backend.scan()] == [HEADER_BYTES + PAGE_BYTES]


def test_those_who_do_not_pack_read_packed_pages_and_the_other_way_round(packer, client):
    backend = MemoryStore()
    packing, plain = client(backend, packer=packer), client(backend)
    put(packing, like_keys_and_values(1), b"1" * 32)
    put(plain, like_keys_and_values(2), b"2" * 32)
    assert get(plain, b"1" * 32) == (OK, like_keys_and_values(1))
    assert get(packing, b"2" * 32) == (OK, like_keys_and_values(2))


def test_the_width_that_packs_best_is_found(packer):
    for dtype, stride in ((np.float32, 4), ("bfloat16", 2)):
        fresh = Packer(packer._kind)
        room = memoryview(bytearray(PAGE_BYTES))
        assert fresh.pack(like_keys_and_values(dtype=dtype), room).stride == stride, dtype


@pytest.mark.parametrize("at", [0, 9, 60, 130, 146, 155, 4090, HEADER_BYTES, HEADER_BYTES + 999])
def test_one_bit_changed_anywhere_never_passes_c17(packer, client, at):
    backend = MemoryStore()
    store = client(backend, packer=packer)
    put(store, like_keys_and_values())
    (item,) = backend._objects.values()
    damaged = bytearray(item.data)
    damaged[at] ^= 1
    item.data = bytes(damaged)
    assert get(store)[0] in (MISS, CORRUPT)
    assert get(store)[0] is MISS


@pytest.mark.parametrize("cut", [HEADER_BYTES, 2 * HEADER_BYTES])
def test_one_that_ends_early_never_passes_c17(packer, client, cut):
    backend = MemoryStore()
    store = client(backend, packer=packer)
    put(store, like_keys_and_values())
    (item,) = backend._objects.values()
    item.data = item.data[:-cut]
    assert get(store)[0] is CORRUPT


def test_one_that_says_it_is_of_another_name_is_not_unpacked(packer, client):
    backend = MemoryStore()
    store = client(backend, packer=packer)
    put(store, like_keys_and_values(1), b"1" * 32)
    put(store, like_keys_and_values(2), b"2" * 32)
    one, two = (object_name(PART, key) for key in (b"1" * 32, b"2" * 32))
    backend._objects[two].data = backend._objects[one].data
    assert get(store, b"2" * 32)[0] is CORRUPT


def test_bytes_that_would_unpack_to_more_than_a_page_are_refused(packer):
    room = memoryview(bytearray(PAGE_BYTES))
    packing = packer.pack(memoryview(bytearray(PAGE_BYTES)), room)
    small = memoryview(bytearray(HEADER_BYTES))
    assert not unpack(packing, room, small)
    assert not unpack(packing._replace(stride=3), room, memoryview(bytearray(PAGE_BYTES)))
    unknown = Packing(PackKind.NONE, 1, packing.packed_bytes)
    assert not unpack(unknown, room, memoryview(bytearray(PAGE_BYTES)))


def test_packed_pages_in_files_are_verified_by_hand_too(packer, client, file_store):
    backend = file_store()
    store = client(backend, packer=packer)
    put(store, like_keys_and_values(1), b"1" * 32)
    put(store, like_keys_and_values(2), b"2" * 32)
    assert get(store, b"1" * 32) == (OK, like_keys_and_values(1))
    url = f"file://{file_store.root}"
    assert maintenance.verify(url).num_ok == 2
    file_store.damage(b"2" * 32, HEADER_BYTES + 50)
    assert maintenance.verify(url).mismatches == {Mismatch.CHECKSUM: 1}


def test_packed_with_what_is_not_known_is_another_versions(packer, client, monkeypatch):
    backend = MemoryStore()
    put(client(backend, packer=packer), like_keys_and_values())
    (item,) = backend._objects.values()
    header = memoryview(bytearray(item.data[:HEADER_BYTES]))
    monkeypatch.setattr("quire.store.codec.PackKind", lambda text: PackKind("of the future"))
    assert open_header(header) is Mismatch.VERSION


def test_a_page_that_was_not_packed_is_not_unpacked(client):
    backend = MemoryStore()
    put(client(backend), noise())
    (item,) = backend._objects.values()
    header, page = memoryview(bytearray(item.data[:HEADER_BYTES])), noise()
    assert not unpack_in_place(PART, b"k" * 32, header, page)
    assert check_packed(PART, b"k" * 32, header, page) is None


def test_without_its_package_a_codec_is_one_sentence(monkeypatch):
    def missing():
        raise ImportError("no such package")

    monkeypatch.setitem(__import__("quire.store.packing").store.packing._CODECS, "zstd", missing)
    with pytest.raises(StoreURLError, match=r"quire\[codecs\]"):
        Packer(PackKind.ZSTD)


def test_pages_packed_with_what_is_not_installed_here_are_left_to_those_who_have_it_c17(
    packer, client, file_store, monkeypatch
):
    """One engine has the codecs extra, another does not: it must not take good pages for damaged
    ones and out of the store."""
    backend = file_store()
    put(client(backend, packer=packer), like_keys_and_values())
    (before,) = file_store.object_files()
    url, module = f"file://{file_store.root}", {"zstd": "zstandard", "lz4": "lz4.block"}
    with monkeypatch.context() as without:
        without.setitem(sys.modules, module[packer._kind], None)
        poor = client(backend)
        assert get(poor)[0] is MISS
        assert counted(poor, "mismatch") == {Mismatch.CODEC: 1}
        report = maintenance.verify(url, quarantine=True)
    assert report.num_quarantined == 0
    (said,) = explain(url, report)
    assert "1 page left alone" in said
    assert "pip install quire[codecs]" in said
    assert file_store.object_files() == [before]
    assert get(client(backend)) == (OK, like_keys_and_values())
