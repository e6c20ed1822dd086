"""A writer is killed with SIGKILL at random points; what is left is right or a miss."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.store import HEADER_BYTES, PageStore, Part
from quire.store.file import FileStore
from quire.types import PageKey, PageStatus

PART = Part("full", 0, 1, b"f" * 32, 64 * HEADER_BYTES)
NUM_KEYS = 400

# Writes pages for ever, content derived from the key; says when the first are there.
WRITER = """
import itertools, mmap, sys, time
from pathlib import Path
from quire.store import PageStore
from quire.store.file import FileStore
from test_file_store_kill import NUM_KEYS, PART, content, key
store = FileStore(Path(sys.argv[1]), max_bytes=200 * PART.page_bytes, reserve_bytes=0)
client = PageStore(store, clock=time.monotonic)
pages = [memoryview(mmap.mmap(-1, PART.page_bytes)) for _ in range(8)]
for first in itertools.cycle(range(int(sys.argv[2]), NUM_KEYS, 8)):
    numbers = range(first, first + 8)
    for page, n in zip(pages, numbers):
        page[:] = content(n)
    client.put(PART, [key(n) for n in numbers], pages, deadline=time.monotonic() + 60)
    print("written", flush=True)
"""


def key(n: int) -> PageKey:
    return PageKey(n.to_bytes(4, "little") * 8)


def content(n: int) -> bytes:
    return n.to_bytes(4, "big") * (PART.page_bytes // 4)


def write_and_kill(root: Path, first: int, delay_s: float) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(first)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert writer.stdout is not None
    with writer, writer.stdout as stdout:
        assert stdout.readline() == b"written\n"
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_writer_leaves_right_pages_or_misses_c17(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "store"
    chance = random.Random(seed)
    num_right = 0
    for _ in range(3):
        write_and_kill(root, chance.randrange(NUM_KEYS // 8) * 8, chance.uniform(0.002, 0.15))
        store = FileStore(root, max_bytes=1 << 30, reserve_bytes=0)
        assert store.wait_scanned(300)
        assert not list(root.rglob("*.tmp"))
        found = [item.size_bytes for item in store.scan()]
        assert store.stats().used_bytes == sum(found)
        client = PageStore(store, clock=time.monotonic)
        page = memoryview(bytearray(PART.page_bytes))
        for n in range(NUM_KEYS):
            (status,) = client.get(PART, [key(n)], [page], deadline=time.monotonic() + 60)
            assert status in (PageStatus.OK, PageStatus.MISS)
            if status is PageStatus.OK:
                assert page == content(n)
                num_right += 1
        client.close()
    assert num_right > 0
