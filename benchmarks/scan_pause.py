"""How long other threads stand still while a file store of a million objects is scanned.

    python benchmarks/scan_pause.py FOLDER [OBJECTS]

Empty objects, so that only the names count. One thread wakes up two thousand times a
second, as a step would; its longest gaps, and those of the same thread while nothing is scanned,
are printed with the memory that the scan took.
"""

import json
import os
import resource
import secrets
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from quire.store.file.store import FileStore

SHARDS = 256
WAIT_S = 0.0005


def fill(root: str, shard: int, count: int) -> None:
    folder = f"{root}/objects/{shard:02x}"
    os.makedirs(folder, exist_ok=True)
    for _ in range(count):
        name = f"{shard:02x}{secrets.token_hex(31)}.full.0of1"
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY))


def gaps_ms(stop: threading.Event, at_least_s: float) -> list[float]:
    """The longest five."""
    found = [0.0] * 5
    start = last = time.perf_counter()
    while not stop.is_set() or last - start < at_least_s:
        time.sleep(WAIT_S)
        now = time.perf_counter()
        if (now - last) * 1e3 > found[0]:
            found = sorted([*found[1:], (now - last) * 1e3])
        last = now
    return found[::-1]


def main() -> None:
    root, count = Path(sys.argv[1]), int((sys.argv[2:] or ["1000000"])[0])
    FileStore(root).close()
    with ProcessPoolExecutor() as pool:
        list(pool.map(fill, [str(root)] * SHARDS, range(SHARDS), [count // SHARDS] * SHARDS))
    over = threading.Event()
    over.set()
    quiet = gaps_ms(over, 2.0)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    store = FileStore(root, max_bytes=1 << 40)
    scanned = store._scanner.scanned
    busy = gaps_ms(scanned, 0.0)
    seconds = time.perf_counter() - start
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store.close()
    print(
        json.dumps(
            {
                "objects": count,
                "scan_s": round(seconds, 2),
                "longest_gaps_ms": [round(gap, 2) for gap in busy],
                "longest_gaps_without_ms": [round(gap, 2) for gap in quiet],
                "bytes_per_object": round((after_kib - before_kib) * 1024 / count, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
