"""Connections that do not behave: uvicorn's HTTP/1.1 protocol with the limits it lacks.

    head      a request's line and headers arrive within head_timeout_s, or 408 and close
    write     a client takes what is sent to it within write_timeout_s, or the connection is cut
    number    beyond max_connections a connection is told 503 and closed
    junk      what is not HTTP is told so in our format: 400, or 431 for a head that is too large

The head's clock runs from the connection's first moment, and again from the first byte of each
later request; in between, uvicorn's own keep-alive clock does. Bodies are BodyGuard's.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.web.config import WebConfig
from quire.web.errors import ApiError


class GuardedConfig(uvicorn.Config):
    """uvicorn's configuration, with ours for the protocol to find."""

    def __init__(self, app: Any, web: WebConfig) -> None:
        super().__init__(
            app,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,  # they would let a client choose the address we see
            server_header=False,
            timeout_keep_alive=web.keep_alive_s,
            h11_max_incomplete_event_size=web.max_head_bytes,
        )
        self.web = web


class GuardedProtocol(H11Protocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = cast(GuardedConfig, self.config).web
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ---- uvicorn's hooks ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(
                ApiError(
                    503,
                    f"{self._limits.max_connections} connections are open (max_connections): "
                    "try again later",
                    code="too_many_connections",
                    headers={"Retry-After": "1"},
                )
            )
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()  # called while what h11 found wrong is being handled
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            limit = self._limits.max_head_bytes
            self._refuse(ApiError(431, f"the request's head is larger than {limit} bytes"))
        else:
            what = str(error or msg).partition(": bytearray")[0]  # not their bytes back
            self._refuse(ApiError(status, f"this is not a valid HTTP request: {what}"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    # ---- inside ---------------------------------------------------------------------------------

    def _watch_head(self) -> None:
        """The head's clock runs while h11 waits for one: IDLE is before a head is complete."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        limit = self._limits.head_timeout_s
        self._refuse(
            ApiError(
                408,
                f"the request's head did not arrive within {limit:g} s: send it faster",
                code="slow_head",
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, and close."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self._is_answering():
            body = error.encoded()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            } | error.headers
            for event in (
                h11.Response(status_code=error.status, headers=list(headers.items())),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # whoever still works on an answer need not
        self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and (
            self.cycle.response_started and not self.cycle.response_complete
        )

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
