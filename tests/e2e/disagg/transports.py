"""By which transport pages travel in these tests: all of them can be run over each.

    QUIRE_TEST_TRANSPORT=nixl pytest tests/e2e/disagg        (make test-transports: over every one)

Tests that name a transport themselves keep it.
"""

import os

import pytest

from quire.peer.kinds import TransportKind

CHOSEN = TransportKind(os.environ.get("QUIRE_TEST_TRANSPORT", TransportKind.AUTO))


def skip_unless_installed(kind: TransportKind) -> None:
    if kind is TransportKind.NIXL:
        pytest.importorskip("nixl", reason="pip install --no-deps nixl nixl-cu12")
