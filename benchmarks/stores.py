"""Every store that has a client of its own beside that client, on servers started here.

    python benchmarks/stores.py [--rounds N] [--page SIZE] [redis] [mooncake] [s3] [file]

Redis is also compared with our own connection, which copies less than redis-py, and Mooncake with
its client called by as few threads at a time as the store calls it: both are faster than the client
as its users call it.

Prints what `quire bench store URL` measures, one line for each way, with the machine's load: the
median of the ratios of neighbouring rounds, their quartiles and extremes, and what the client does.
The servers run on the same cores: on a machine with few of them, or with others at work on it, both
sides are slower, and the ratios noisier. S3 is a test double (`moto`).
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from quire.bench import anystore  # noqa: E402
from quire.bench.anystore import CALLERS, Measured  # noqa: E402
from quire.bench.raw import TIMEOUT_S, RawClient, RawPool, expect, join_pool  # noqa: E402
from quire.sizes import parse_size  # noqa: E402
from quire.store.base import ObjectName  # noqa: E402
from quire.store.mooncake.pool import at_once  # noqa: E402
from quire.store.mooncake.turns import Turns  # noqa: E402
from quire.store.redis.connection import RedisConnection  # noqa: E402
from quire.store.redis.store import address_of, login_of  # noqa: E402
from quire.store.redis.wire import command, set_command  # noqa: E402
from quire.store.url import StoreURL  # noqa: E402
from store_servers import Mooncake, Moto, Valkey  # noqa: E402


class BareRedis:
    """One connection; all commands of a call are sent before the first answer is read."""

    does = "our own connection, which copies less than common clients; SET and GET, pipelined"

    def __init__(self, url: StoreURL) -> None:
        login = login_of(url, url.options.get("ca", ""))
        self._connection = RedisConnection(address_of(url), login, time.monotonic() + TIMEOUT_S)
        self._prefix = url.options.get("prefix", "quire:")

    def put(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        sets = [set_command(self._key(n), [p]) for n, p in zip(names, pages, strict=True)]
        self._connection.send([b for each in sets for b in each], time.monotonic() + TIMEOUT_S)
        for _ in names:
            expect(self._connection.answer() in (b"OK", "OK"))

    def get(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        gets = [command(b"GET", self._key(name)) for name in names]
        self._connection.send([b for each in gets for b in each], time.monotonic() + TIMEOUT_S)
        for page in pages:
            expect(self._connection.answer_into([page]) == page.nbytes)

    def close(self) -> None:
        self._connection.close()

    def _key(self, name: ObjectName) -> bytes:
        return f"{self._prefix}{{{name.text}}}".encode()


class PoolInTurns(RawPool):
    does = "batch_put_from and batch_get_into, as few calls at a time as the store makes"

    def __init__(self, url: StoreURL, shared: Any, turns: Turns) -> None:
        super().__init__(url, shared)
        self._turns = turns

    def put(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        with self._turns.turn():
            super().put(names, pages)

    def get(self, names: Sequence[ObjectName], pages: Sequence[memoryview]) -> None:
        with self._turns.turn():
            super().get(names, pages)


@contextmanager
def own_connections(bench: Measured, _size: int) -> Iterator[list[RawClient]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(BareRedis(bench.url))) for _ in range(CALLERS)]


@contextmanager
def in_turns(bench: Measured, _size: int) -> Iterator[list[RawClient]]:
    shared, turns = join_pool(bench.url, bench.memory), Turns(at_once())
    try:
        yield [PoolInTurns(bench.url, shared, turns) for _ in range(CALLERS)]
    finally:
        shared[0].close()


AT_BEST = {"redis": own_connections, "mooncake": in_turns}


class Folder:
    """Beside the disk itself."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}"

    def stop(self) -> None: ...


SERVERS = {
    "redis": Valkey,
    "mooncake": lambda folder: Mooncake(folder, holder_bytes=1 << 30),
    "s3": Moto,
    "file": Folder,
}
TOTALS = {"s3": "256MiB"}
"""Less than `quire bench store` moves: of a double that is slow."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="STORE", help=f"of {', '.join(SERVERS)}; all")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--page", default="2MiB")
    parser.add_argument("--total", help="of each round; 512MiB, of some less")
    said = parser.parse_args()
    if unknown := sorted(set(said.names) - set(SERVERS)):
        parser.error(f"{unknown[0]!r} is none of {', '.join(SERVERS)}")
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
    for name in said.names or SERVERS:
        how = {
            "page_bytes": parse_size(said.page),
            "total_bytes": parse_size(said.total or TOTALS.get(name, "512MiB")),
            "rounds": said.rounds,
        }
        with tempfile.TemporaryDirectory() as folder:
            server = SERVERS[name](Path(folder))
            try:
                show(name, anystore.run(server.url, **how))
                if name in AT_BEST:
                    show(name, anystore.run(server.url, beside=AT_BEST[name], **how))
            finally:
                server.stop()


def show(name: str, result: dict) -> None:
    load = os.getloadavg()[0]
    print(f"{name:9}its client: {result['client']}")
    for way in ("write", "read"):
        row = result[way]
        low, high = row["ratio_quartiles"]
        print(
            f"{name:9}{way:6} {row['store_gb_s']:.3f} GB/s, its client {row['raw_gb_s']:.3f}, "
            f"ratio {row['ratio']:.2f} (quartiles {low:.2f} … {high:.2f}; "
            f"{row['ratio_min']:.2f} … {row['ratio_max']:.2f}), load {load:.1f}"
        )
    if probe := result.get("probe"):
        print(
            f"{name:9}probe  1 key {probe['one_ms']:.2f} ms, {probe['keys']} "
            f"{probe['all_ms']:.2f} ms"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
