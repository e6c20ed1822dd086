"""Tickets: what a reader shows to read the pages of a grant. Whom they were offered to has one, and
nobody else: grants have numbers that can be guessed, and all engines know the secret.

A leader and its ranks share a key, new at every start; so nothing need be said about each ticket.
"""

from __future__ import annotations

import hmac

_TICKET_BYTES = 16


class Tickets:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, grant: int) -> bytes:
        return hmac.digest(self._key, b"grant %d" % grant, "sha256")[:_TICKET_BYTES]

    def fits(self, grant: int, ticket: bytes) -> bool:
        return hmac.compare_digest(self.of(grant), ticket)
