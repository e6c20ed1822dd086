"""What a Mooncake master tells over HTTP, on its port for metrics: names and figures.

For people only (`quire store ls`, `verify`): pages need none of it.
"""

from __future__ import annotations

from http.client import HTTPException
from urllib.error import URLError
from urllib.request import urlopen

from quire.errors import StoreError
from quire.store.base import StoreStats

_TIMEOUT_S = 10.0


class Master:
    def __init__(self, address: str) -> None:
        self._address = address

    def all_keys(self) -> list[str]:
        """Of every object in the pool, whoever put it there."""
        return self._read("get_all_keys").split("\n")

    def stats(self) -> StoreStats:
        """Of the whole pool; nothing, if nobody answers."""
        try:
            lines = self._read("metrics").split("\n")
        except StoreError:
            return StoreStats()
        figures = dict(line.rsplit(" ", 1) for line in lines if line.startswith("master_"))
        return StoreStats(
            used_bytes=_whole(figures.get("master_allocated_bytes")),
            capacity_bytes=_whole(figures.get("master_total_capacity_bytes")),
            evicted_objects=_whole(figures.get("master_evicted_key_count")) or 0,
        )

    def _read(self, path: str) -> str:
        try:
            with urlopen(f"http://{self._address}/{path}", timeout=_TIMEOUT_S) as answer:
                return str(answer.read().decode("ascii", "replace"))
        except (URLError, HTTPException, OSError, ValueError) as error:
            raise StoreError(
                f"the Mooncake master tells nothing at {self._address} ({type(error).__name__}): "
                "give its port for metrics as ?metrics=host:9003"
            ) from None


def _whole(text: str | None) -> int | None:
    try:
        return None if text is None else int(float(text))
    except ValueError:
        return None
