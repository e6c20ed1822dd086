"""Exporter: spans on their way to a collector, by OTLP over HTTP, as JSON.

    add ──▶ queue, bounded ──▶ a thread: POST …/v1/traces ─┬─ 2xx: exported
             └─ full: dropped                               ├─ may come to something: again, later
                                                            └─ 4xx, 501: refused

`add` never waits: a collector that is slow or gone costs spans, which are counted. Knows the
collector's address, nothing of what the spans are about.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

import httpx

from quire.tracing.collector import endpoint
from quire.tracing.spans import Attribute, Span, attributes

MAX_WAITING = 4096
"""Spans; a span is about a kilobyte."""
MAX_BATCH = 512
EVERY_S = 1.0
TIMEOUT_S = 5.0
CLOSE_S = 2.0
"""For the last spans, when the process is to end."""
_MAX_PAUSE_S = 30.0
_AGAIN = (408, 429, 500, 502, 503, 504)

logger = logging.getLogger("quire.events")

_Outcome = Callable[[str, int], None]
"""Told of spans that are exported, dropped or refused."""


class Exporter:
    """Its thread runs until `close`."""

    def __init__(
        self,
        url: str,
        resource: Mapping[str, Attribute],
        count: _Outcome,
        *,
        every_s: float = EVERY_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`resource`: what all spans come from. Raises ConfigError."""
        self._url = endpoint(url)
        self._resource = {"attributes": attributes(resource)}
        self._count = count
        self._every_s = every_s
        self._max_waiting = max_waiting
        self._waiting: deque[Span] = deque()
        self._is_closing = threading.Event()
        self.is_well = True
        self._thread = threading.Thread(target=self._run, name="quire-otlp", daemon=True)
        self._thread.start()

    def add(self, span: Span) -> None:
        if len(self._waiting) >= self._max_waiting:
            self._count("dropped", 1)
        else:
            self._waiting.append(span)

    def close(self) -> None:
        """What waits is tried once more, and not for long."""
        self._is_closing.set()
        self._thread.join(2 * CLOSE_S)

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = self._every_s
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            while not self._is_closing.wait(pause_s):
                is_well = self._send_waiting(client)
                self._say(is_well)
                pause_s = self._every_s if is_well else min(2 * pause_s, _MAX_PAUSE_S)
            client.timeout = httpx.Timeout(CLOSE_S)
            self._send_waiting(client)
        self._count("dropped", len(self._waiting))

    def _send_waiting(self, client: httpx.Client) -> bool:
        """False: nobody took them, and they wait on."""
        while self._waiting:
            batch = [self._waiting[i] for i in range(min(MAX_BATCH, len(self._waiting)))]
            taken = self._send(client, batch)
            if taken is None:
                return False
            for _ in batch:
                self._waiting.popleft()
            self._count("exported", taken)
            self._count("refused", len(batch) - taken)
        return True

    def _send(self, client: httpx.Client, batch: list[Span]) -> int | None:
        """How many of them the collector took; None: it may take them later."""
        scope = {"scope": {"name": "quire"}, "spans": [span.as_json() for span in batch]}
        body = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        try:
            answer = client.post(
                self._url, content=json.dumps(body), headers={"content-type": "application/json"}
            )
        except httpx.HTTPError:
            return None
        if answer.status_code in _AGAIN:
            return None
        return len(batch) - _rejected(answer) if answer.is_success else 0

    def _say(self, is_well: bool) -> None:
        """Once when it begins, once when it is over."""
        if is_well == self.is_well:
            return
        self.is_well = is_well
        text = (
            "the collector of traces takes spans again"
            if is_well
            else "the collector of traces does not take spans: they wait, and those for which "
            "there is no room are dropped"
        )
        level = logging.INFO if is_well else logging.WARNING
        logger.log(level, "%s", text, extra={"fields": {"event": "otlp", "well": is_well}})


def _rejected(answer: httpx.Response) -> int:
    """Of a batch that was taken, the spans that were not."""
    try:
        return int(answer.json().get("partialSuccess", {}).get("rejectedSpans", 0))
    except (ValueError, TypeError, AttributeError):  # an empty answer says that all is well
        return 0
