"""Stop: how a server is told to stop, and how soon. Knows signals; not what is stopped.

SIGTERM   finish what runs, take nothing new
SIGINT    (Ctrl-C) soon; and so is any second signal
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


class Stop:
    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._soon = asyncio.Event()

    @property
    def is_set(self) -> bool:
        return self._told.is_set()

    def set(self, *, soon: bool = False) -> None:
        if soon or self._told.is_set():
            self._soon.set()
        self._told.set()

    async def wait(self) -> None:
        await self._told.wait()

    async def wait_soon(self) -> None:
        """Until nothing is to be waited for any more."""
        await self._soon.wait()


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    stop = Stop()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: stop.set(soon=True))
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
