"""TLS 1.3 between engines that know one secret: both ends show, and expect, its certificate.

Knows contexts; not when a connection is encrypted, nor what it carries.
"""

from __future__ import annotations

import functools
import os
import ssl

from quire.peer.certificate import certificate_of
from quire.peer.errors import PeerError


@functools.lru_cache(maxsize=16)
def tls_context(secret: str, *, is_server: bool) -> ssl.SSLContext:
    found = certificate_of(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # all have the same: whoever has its key is one of us
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # it has no extensions that say what it is for
    context.load_verify_locations(cadata=found.der)
    if is_server:
        context.num_tickets = 0  # nothing is resumed
    _load_key(context, found.pem)
    return context


def check_certificate(secret: str, shown: bytes | None) -> None:
    """Raises PeerError unless it is ours."""
    if shown != certificate_of(secret).der:
        raise PeerError("the other side shows another certificate")


def _load_key(context: ssl.SSLContext, pem: str) -> None:
    """From memory: a key is in no file."""
    file = os.memfd_create("quire-key", os.MFD_CLOEXEC)
    try:
        os.write(file, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
