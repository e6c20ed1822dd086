from __future__ import annotations

import dataclasses

import pytest
import xxhash

from quire.store.base import HEADER_BYTES
from quire.store.codec import Mismatch, check, open_header, seal


@pytest.fixture
def sealed(pages):
    header = memoryview(bytearray(b"\xff" * HEADER_BYTES))
    payload = pages.full(7)
    seal(pages.part, pages.key(7), payload, header)
    return header, payload


def reseal(header):
    header[-16:] = xxhash.xxh3_128_digest(header[:-16])


def test_sealed_page_checks_out(pages, sealed):
    assert check(pages.part, pages.key(7), *sealed) is None


def test_header_depends_only_on_the_page_not_on_old_buffer_content(pages, sealed):
    clean = memoryview(bytearray(HEADER_BYTES))
    seal(pages.part, pages.key(7), pages.full(7), clean)
    assert clean == sealed[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": b"g" * 32}, Mismatch.FINGERPRINT),
        ({"component": "window"}, Mismatch.COMPONENT),
        ({"shard": 1, "num_shards": 2}, Mismatch.COMPONENT),
        ({"page_bytes": 4096}, Mismatch.LENGTH),
    ],
)
def test_page_of_another_part_is_refused_c17(pages, sealed, change, reason):
    other = dataclasses.replace(pages.part, **change)
    assert check(other, pages.key(7), *sealed) is reason


def test_page_under_another_key_is_refused_c17(pages, sealed):
    assert check(pages.part, pages.key(8), *sealed) is Mismatch.KEY


def test_short_payload_is_refused_c17(pages, sealed):
    header, payload = sealed
    assert check(pages.part, pages.key(7), header, payload[:-4096]) is Mismatch.LENGTH


def test_length_in_the_header_is_evidence_never_trusted_c17(pages, sealed):
    header, payload = sealed
    header[120:128] = (1 << 60).to_bytes(8, "little")
    reseal(header)
    assert check(pages.part, pages.key(7), header, payload) is Mismatch.LENGTH


def test_bad_magic_is_refused_c17(pages, sealed):
    sealed[0][0] ^= 1
    assert check(pages.part, pages.key(7), *sealed) is Mismatch.MAGIC


def test_other_version_is_told_from_damage_c17(pages, sealed):
    header, payload = sealed
    header[8] = 99
    assert check(pages.part, pages.key(7), header, payload) is Mismatch.HEADER
    reseal(header)
    assert check(pages.part, pages.key(7), header, payload) is Mismatch.VERSION


@pytest.mark.parametrize("offset", [9, 20, 50, 81, 113, 121, 130, 144, 4000, 4090])
def test_any_flipped_header_bit_is_refused_c17(pages, sealed, offset):
    sealed[0][offset] ^= 4
    assert check(pages.part, pages.key(7), *sealed) is Mismatch.HEADER


@pytest.mark.parametrize("offset", [0, 5000, -1])
def test_any_flipped_payload_bit_is_refused_c17(pages, sealed, offset):
    sealed[1][offset] ^= 1
    assert check(pages.part, pages.key(7), *sealed) is Mismatch.CHECKSUM


def test_zeros_are_no_header():
    assert open_header(memoryview(bytes(HEADER_BYTES))) is Mismatch.MAGIC


def test_component_that_does_not_fit_is_an_error_of_the_caller(pages):
    part = dataclasses.replace(pages.part, component="c" * 33)
    with pytest.raises(ValueError, match="does not fit"):
        seal(part, pages.key(1), pages.full(1), memoryview(bytearray(HEADER_BYTES)))
