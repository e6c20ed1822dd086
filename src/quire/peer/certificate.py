"""A key and a certificate that follow from a secret: the same for all who know it, and for nobody
else. With them TLS needs no files and no authority: each side expects exactly its own certificate.

Knows the curve P-256 (FIPS 186-4) and just enough DER for one self-signed certificate. It is made
once in a process, and not by somebody else's choice: the arithmetic need not be fast, nor take the
same time for every key.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
from typing import NamedTuple

_P = 0xFFFFFFFF00000001000000000000000000000000FFFFFFFFFFFFFFFFFFFFFFFF
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_SIGNED_WITH = "06082a8648ce3d040302"  # ecdsa-with-SHA256
_EC_KEY, _CURVE = "06072a8648ce3d0201", "06082a8648ce3d030107"  # id-ecPublicKey, prime256v1
_COMMON_NAME = "0603550403"
_NAME = b"quire peer"
_SALT = b"quire peer certificate, 1"
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1}

Point = tuple[int, int]


class Certificate(NamedTuple):
    der: bytes
    pem: str
    """The certificate, and its key."""


@functools.lru_cache(maxsize=8)
def certificate_of(secret: str) -> Certificate:
    """The same for the same secret, on every machine."""
    seed = hashlib.scrypt(secret.encode(), salt=_SALT, dklen=32, **_SCRYPT)
    key = _number(seed, b"key")
    x, y = _times(key, _G)
    public = b"\4" + x.to_bytes(32) + y.to_bytes(32)
    signed = _to_be_signed(public)
    der = _sequence(signed, _sequence(_oid(_SIGNED_WITH)), _bits(_signature(seed, key, signed)))
    private = _sequence(
        _integer(1),
        _field(0x04, key.to_bytes(32)),
        _field(0xA0, _oid(_CURVE)),
        _field(0xA1, _bits(public)),
    )
    return Certificate(der, _pem("CERTIFICATE", der) + _pem("EC PRIVATE KEY", private))


# ---- the curve -----------------------------------------------------------------------------------


def _add(one: Point | None, other: Point | None) -> Point | None:
    """None is the point at infinity."""
    if one is None or other is None:
        return one or other
    (x1, y1), (x2, y2) = one, other
    if x1 == x2:
        if (y1 + y2) % _P == 0:
            return None
        slope = (3 * x1 * x1 - 3) * pow(2 * y1, -1, _P) % _P
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, _P) % _P
    x = (slope * slope - x1 - x2) % _P
    return x, (slope * (x1 - x) - y1) % _P


def _times(factor: int, point: Point) -> Point:
    total: Point | None = None
    power: Point | None = point
    while factor:
        if factor & 1:
            total = _add(total, power)
        power = _add(power, power)
        factor >>= 1
    assert total is not None
    return total


def _number(seed: bytes, purpose: bytes) -> int:
    """In 1 … n - 1; from so many bits that none of them is likelier than another."""
    data = b"".join(hmac.digest(seed, purpose + bytes([i]), "sha256") for i in range(2))
    return int.from_bytes(data) % (_N - 1) + 1


def _signature(seed: bytes, key: int, message: bytes) -> bytes:
    digest = hashlib.sha256(message).digest()
    nonce = _number(seed, b"nonce" + digest)  # of this message, which is the only one
    r = _times(nonce, _G)[0] % _N
    s = pow(nonce, -1, _N) * (int.from_bytes(digest) + r * key) % _N
    return _sequence(_integer(r), _integer(s))


# ---- DER -----------------------------------------------------------------------------------------


def _to_be_signed(public: bytes) -> bytes:
    name = _sequence(_field(0x31, _sequence(_oid(_COMMON_NAME), _field(0x0C, _NAME))))
    valid = _sequence(_field(0x17, b"200101000000Z"), _field(0x18, b"99991231235959Z"))
    keyed = _sequence(_sequence(_oid(_EC_KEY), _oid(_CURVE)), _bits(public))
    return _sequence(_integer(1), _sequence(_oid(_SIGNED_WITH)), name, valid, name, keyed)


def _field(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, 0x80 | len(length)]) + length + content


def _sequence(*parts: bytes) -> bytes:
    return _field(0x30, b"".join(parts))


def _integer(number: int) -> bytes:
    return _field(0x02, number.to_bytes(number.bit_length() // 8 + 1))


def _bits(content: bytes) -> bytes:
    return _field(0x03, b"\0" + content)


def _oid(encoded: str) -> bytes:
    return bytes.fromhex(encoded)


def _pem(what: str, der: bytes) -> str:
    text = base64.b64encode(der).decode()
    lines = "\n".join(text[i : i + 64] for i in range(0, len(text), 64))
    return f"-----BEGIN {what}-----\n{lines}\n-----END {what}-----\n"
