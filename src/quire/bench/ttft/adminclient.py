"""The admin API of a Quire server, as far as benchmarks need it: flush tiers, wait until idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx

from quire.errors import EngineError

_POLL_S = 0.05


class AdminClient:
    def __init__(self, client: httpx.AsyncClient, key: str) -> None:
        self._client = client
        self._headers = {"Authorization": f"Bearer {key}"}

    async def flush(self, tiers: Sequence[str]) -> None:
        """Raises EngineError."""
        await self._call("POST", "/admin/cache/flush", {"tiers": list(tiers)})

    async def wait_idle(self, timeout_s: float = 120.0) -> float:
        """Until no operation (copy, write, fetch) is in flight and no write is still to come;
        seconds it took. Raises EngineError."""
        start = time.perf_counter()
        while time.perf_counter() - start < timeout_s:
            status = await self._call("GET", "/admin/cache")
            moving = status["operations"] | {"writes to come": status["waiting_writes"]}
            if not any(moving.values()):
                return time.perf_counter() - start
            await asyncio.sleep(_POLL_S)
        raise EngineError(
            f"the server still moves pages after {timeout_s:g} s ({moving}): is the disk very slow?"
        )

    async def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            response = await self._client.request(
                method, path, json=body, headers=self._headers, timeout=120.0
            )
        except httpx.HTTPError as error:
            raise EngineError(f"{method} {path} failed ({error}): see the server's log") from error
        if response.status_code != httpx.codes.OK:
            raise EngineError(
                f"{method} {path} was answered by {response.status_code}: {response.text[:200]}"
            )
        answer: dict[str, Any] = response.json()
        return answer
