"""FileStore through PageStore: restart, sharing, budget, full disks, foreign files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.errors import StoreError
from quire.store import HEADER_BYTES, Mismatch, maintenance, open_store
from quire.store.file import FileStore
from quire.store.file.layout import Layout
from quire.types import PageStatus
from unit.store.conftest import counted

OK, MISS, CORRUPT, FAILED, TIMEOUT, CANCELLED, REJECTED, ORPHAN = PageStatus


@pytest.fixture
def serial(client, file_store):
    """Makes PageStores whose batches run in order, for tests about order."""

    def make(**options):
        clock = options.get("clock", time.monotonic)
        return client(file_store(**options), clock=clock)

    return make


@pytest.fixture
def plain_calls(monkeypatch):
    """No asynchronous I/O, as in a container that forbids it: preadv and pwritev can be mocked."""
    monkeypatch.setattr("quire.store.file.io.open_ring", lambda: None)


# ---- serving --------------------------------------------------------------------------------


def test_pages_survive_a_restart(client, file_store, pages):
    first = client(file_store())
    assert pages.put(first, *range(30)) == [OK] * 30
    first.close()
    second = client(file_store())
    assert pages.get(second, *range(30), 77) == [OK] * 30 + [MISS]


def test_what_it_holds_and_may_hold_is_told(client, file_store, pages):
    store = client(file_store(max_bytes=1 << 30))
    (before,) = store.health()
    assert pages.put(store, *range(10)) == [OK] * 10
    (after,) = store.health()
    assert after.budget.used_bytes > before.budget.used_bytes
    assert after.budget.max_bytes == 1 << 30


@pytest.mark.usefixtures("plain_calls")
def test_pages_are_served_without_asynchronous_io(client, file_store, pages):
    store = client(file_store())
    assert pages.put(store, *range(30)) == [OK] * 30
    assert pages.get(store, *range(31)) == [OK] * 30 + [MISS]


def test_unaligned_pages_are_served_too(client, file_store, pages, deadline):
    store = client(file_store())
    odd = [memoryview(bytearray(pages.part.page_bytes + 1))[1:] for _ in range(20)]
    for n, page in enumerate(odd):
        page[:] = pages.full(n)
    keys = pages.keys(*range(20))
    assert store.put(pages.part, keys, odd, deadline=deadline) == [OK] * 20
    for page in odd:
        page[:] = bytes(page.nbytes)
    assert store.get(pages.part, keys, odd, deadline=deadline) == [OK] * 20
    assert all(page == pages.full(n) for n, page in enumerate(odd))


def test_read_only_pages_can_be_written(client, file_store, pages, deadline):
    store = client(file_store())
    fixed = [pages.full(n).toreadonly() for n in range(20)]
    keys = pages.keys(*range(20))
    assert store.put(pages.part, keys, fixed, deadline=deadline) == [OK] * 20
    assert pages.get(store, *range(20)) == [OK] * 20


def test_file_system_without_direct_io_is_served_buffered(client, file_store, pages, monkeypatch):
    """Mock: open() refuses O_DIRECT after creating the file, as old tmpfs does."""
    real_open = os.open

    def refusing_open(path, flags, *args, **kwargs):
        fd = real_open(path, flags & ~os.O_DIRECT, *args, **kwargs)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fd

    monkeypatch.setattr(os, "open", refusing_open)
    store = client(file_store())
    assert pages.put(store, 1, 2) == [OK, OK]
    assert pages.get(store, 1, 2) == [OK, OK]


@pytest.mark.parametrize("name", ["coldest", "scan"])
def test_of_a_store_that_cannot_be_opened_no_file_stays_open(file_store, name):
    file_store().close()
    in_the_way = file_store.root / "state" / name
    in_the_way.unlink()
    in_the_way.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match="cannot use"):
        file_store()
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_stores_on_one_directory_see_each_other(client, file_store, pages, deadline):
    one, two = client(file_store()), client(file_store())
    pages.put(one, 1)
    assert two.find(pages.part, [pages.keys(1, 2)], deadline=deadline) == [b"\1\0"]
    assert pages.get(two, 1) == [OK]
    pages.put(two, 1, 2)
    assert two.counters()["skipped_pages"] == 1
    assert pages.get(one, 2) == [OK]


def test_second_process_sees_and_adds(client, file_store, pages, tmp_path):
    store = client(file_store())
    pages.put(store, 1)
    script = """
import sys, time
from quire.store import PageStore, Part, open_store
part = Part("full", 0, 1, b"f" * 32, int(sys.argv[2]))
store = PageStore(open_store(sys.argv[1]), clock=time.monotonic)
key = lambda n: n.to_bytes(4, "little") * 8
page = memoryview(bytearray(part.page_bytes))
deadline = time.monotonic() + 30
assert store.get(part, [key(1)], [page], deadline=deadline) == [0]
assert page[:4] == (1).to_bytes(4, "big")
page[:] = (2).to_bytes(4, "big") * (len(page) // 4)
assert store.put(part, [key(2)], [page], deadline=deadline) == [0]
store.close()
"""
    url = f"file://{tmp_path}/store?reserve=0"
    command = [sys.executable, "-c", script, url, str(pages.part.page_bytes)]
    subprocess.run(command, check=True, timeout=60)
    assert pages.get(store, 1, 2) == [OK, OK]


# ---- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "reason"),
    [(0, Mismatch.MAGIC), (50, Mismatch.HEADER), (HEADER_BYTES + 5, Mismatch.CHECKSUM)],
)
def test_damaged_file_is_quarantined_c17(client, file_store, pages, offset, reason):
    store = client(file_store())
    pages.put(store, 1, 2)
    file_store.damage(pages.key(1), offset)
    assert pages.get(store, 1, 2) == [CORRUPT, OK]
    assert counted(store, "mismatch") == {reason: 1}
    assert len(file_store.quarantined_files()) == 1
    assert store._store.stats().used_bytes == pages.object_bytes
    pages.put(store, 1)
    assert pages.get(store, 1) == [OK]


@pytest.mark.parametrize("length", [0, 100, HEADER_BYTES, HEADER_BYTES + 4096, 40 << 10])
def test_torn_or_overlong_file_is_a_miss_c17(client, file_store, pages, length):
    store = client(file_store())
    pages.put(store, 1)
    os.truncate(file_store.object_files()[0], length)
    assert pages.get(store, 1) == [CORRUPT]
    assert counted(store, "mismatch") == {Mismatch.LENGTH: 1}
    assert pages.put(store, 1) == [OK]
    assert pages.get(store, 1) == [OK]


def test_quarantine_is_bounded(client, file_store, pages):
    store = client(file_store(max_bytes=32 * pages.object_bytes))
    pages.put(store, *range(8))
    for n in range(8):
        file_store.damage(pages.key(n), 5000)
        assert pages.get(store, n) == [CORRUPT]
    assert len(file_store.quarantined_files()) == 2


# ---- budget and full disks ------------------------------------------------------------------


def test_budget_evicts_least_recently_used(client, file_store, pages):
    now_ns = time.time_ns()
    store = client(file_store(max_bytes=3 * pages.object_bytes), wall_ns=lambda: now_ns)
    pages.put(store, 3, 2, 1)  # in the order of a path: the last goes first
    now_ns += 10**10  # what was used a moment ago is not renewed
    pages.get(store, 1)
    assert pages.put(store, 4) == [OK]
    assert pages.get(store, 1, 2, 3, 4) == [OK, MISS, OK, OK]
    stats = store._store.stats()
    assert (stats.used_bytes, stats.evicted_objects) == (3 * pages.object_bytes, 1)


def test_at_the_budget_the_coldest_file_is_written_anew(serial, file_store, pages):
    store = serial(max_bytes=3 * pages.object_bytes)
    pages.put(store, 3, 2, 1)
    before = {path.stat().st_ino for path in file_store.object_files()}
    assert pages.put(store, 4, 5) == [OK, OK]
    assert pages.get(store, 1, 2, 3, 4, 5) == [MISS, MISS, OK, OK, OK]
    assert {path.stat().st_ino for path in file_store.object_files()} == before
    assert store._store.stats().used_bytes == 3 * pages.object_bytes


def test_page_replaced_while_it_is_read_is_a_miss_and_no_damage_c17(
    serial, file_store, pages, monkeypatch
):
    store = serial(max_bytes=3 * pages.object_bytes)
    pages.put(store, 3, 2, 1)
    io = file_store.made[-1]._io
    read = io.read

    def late(fds, buffers):
        monkeypatch.undo()
        assert pages.put(store, 4) == [OK]  # into the file that is open for page 1
        return read(fds, buffers)

    monkeypatch.setattr(io, "read", late)
    assert pages.get(store, 1) == [MISS]
    assert counted(store, "mismatch") == {}
    assert file_store.quarantined_files() == []
    assert pages.get(store, 2, 3, 4) == [OK, OK, OK]


def test_order_of_use_survives_a_restart(serial, file_store, pages):
    first = serial()
    pages.put(first, 1, 2, 3)
    for age, path in zip((10, 30, 20), file_store.object_files(), strict=True):
        os.utime(path, (1e9 - age, 1e9 - age))
    first.close()
    second = serial(max_bytes=3 * pages.object_bytes)
    pages.put(second, 4)
    assert pages.get(second, 1, 2, 3, 4) == [OK, MISS, OK, OK]


def test_reading_an_old_page_renews_its_time(serial, file_store, pages):
    pages.put(serial(), 1)
    (path,) = file_store.object_files()
    os.utime(path, (1e9, 1e9))
    pages.get(serial(), 1)
    assert path.stat().st_mtime > 1e9


def test_stores_on_one_directory_keep_one_budget(serial, file_store, pages):
    limit = 6 * pages.object_bytes
    one, two = serial(max_bytes=limit), serial(max_bytes=limit)
    for n in range(20):
        pages.put(one if n % 2 else two, n)
        assert sum(p.stat().st_size for p in file_store.object_files()) <= limit
    assert one._store.stats().used_bytes == limit


def test_objects_removed_behind_our_back_are_misses(serial, file_store, pages):
    store = serial(max_bytes=3 * pages.object_bytes)
    pages.put(store, 1, 2, 3)
    for path in file_store.object_files():
        path.unlink()
    assert pages.get(store, 1) == [MISS]
    assert pages.put(store, 4) in ([OK], [REJECTED])
    again = serial(max_bytes=3 * pages.object_bytes)
    assert pages.put(again, 5, 6) == [OK, OK]


def test_page_larger_than_the_budget_is_rejected(serial, pages):
    assert pages.put(serial(max_bytes=4096), 1) == [REJECTED]


def test_reserve_beyond_the_free_space_rejects_writes_and_serves_reads_c17(serial, pages):
    pages.put(serial(), 1)
    full = serial(reserve_bytes=1 << 60)
    assert pages.put(full, 2, 3) == [REJECTED, REJECTED]
    assert "reserve" in full._store.stats().read_only


@pytest.mark.usefixtures("plain_calls")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_full_disk_is_read_only_for_a_while_c17(serial, pages, clock, monkeypatch, code):
    """Mock: pwritev raises what a full disk raises."""
    store = serial(clock=clock)
    deadline = clock.now + 1000
    pages.put(store, 1, deadline=deadline)
    calls = []

    def full(*args):
        calls.append(args)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert pages.put(store, 2, 3, deadline=deadline) == [REJECTED, REJECTED]
        assert calls
    assert os.strerror(code) in store._store.stats().read_only
    assert pages.get(store, 1, 2, deadline=deadline) == [OK, MISS]
    assert pages.put(store, 2, deadline=deadline) == [REJECTED]
    assert store._store.stats().used_bytes == pages.object_bytes
    clock.now += 31
    assert pages.put(store, 2, deadline=deadline) == [OK]
    assert store._store.stats().read_only == ""


@pytest.mark.usefixtures("plain_calls")
def test_short_write_is_a_full_disk_c17(serial, file_store, pages, monkeypatch):
    """Mock: the kernel takes the header only."""
    store = serial()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, buffers, offset: HEADER_BYTES)
        assert pages.put(store, 1) == [REJECTED]
    assert file_store.object_files() == []


@pytest.mark.usefixtures("plain_calls")
def test_read_error_fails_that_page_only_c17(serial, pages, monkeypatch):
    """Mock: the first preadv raises EIO."""
    store = serial()
    pages.put(store, 1, 2)
    real, calls = os.preadv, []

    def flaky(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return real(*args)

    monkeypatch.setattr(os, "preadv", flaky)
    assert pages.get(store, 1, 2) == [FAILED, OK]


# ---- what is ours ---------------------------------------------------------------------------


def test_foreign_files_are_left_alone(serial, pages, tmp_path):
    store = serial(max_bytes=2 * pages.object_bytes)
    root = tmp_path / "store"
    key = pages.key(1).hex()
    foreign = [root / "notes.txt", root / "objects/notes", root / f"objects/{key[:2]}/readme.tmp"]
    foreign.append(root / f"objects/{key[:2]}/{key}.full.0of1.bak")
    for path in foreign:
        path.write_text("mine")
    pages.put(store, *range(6))
    assert maintenance.clear(f"file://{root}") == 2
    serial().close()
    assert [path.read_text() for path in foreign] == ["mine"] * 4


def test_clearing_leaves_folders_and_links_of_others_alone_and_ends(serial, pages, tmp_path):
    """Such as what a person has put beside a page to look at it."""
    store = serial()
    pages.put(store, 1, 2)
    root, shard = tmp_path / "store", pages.key(1).hex()[:2]
    mine = [root / "quarantine/looked/at/notes.txt", root / f"objects/{shard}/mine/notes.txt"]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    (root / "quarantine/link").symlink_to(tmp_path)
    dangling = root / f"objects/{shard}/{pages.key(3).hex()}.full.0of1"
    dangling.symlink_to("nowhere")
    ran = cleared(root)
    assert "3 pages removed" in ran.stdout, ran.stderr
    assert [path.read_text() for path in mine] == ["mine"] * 2
    assert (root / "quarantine/link").is_symlink()
    assert not dangling.is_symlink()
    assert pages.get(store, 1, 2) == [MISS, MISS]
    assert pages.put(store, 1) == [OK]


def test_what_cannot_be_deleted_when_it_was_cleared_is_told_in_a_sentence(serial, pages, tmp_path):
    """A disk mounted in the middle of it. Needs root."""
    store = serial()
    pages.put(store, 1, 2)
    root, shard = tmp_path / "store", pages.key(1).hex()[:2]
    place = root / f"objects/{shard}/disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "quire-tests", str(place)]
    if subprocess.run(mount, capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("a disk of its own cannot be made here")
    try:
        ran = cleared(root)
        assert ran.returncode == 2
        assert "has files in it that cannot be deleted" in ran.stderr
        assert "Traceback" not in ran.stderr
        assert pages.get(store, 1, 2) == [MISS, MISS]
        assert pages.put(store, 1) == [OK]
    finally:
        (moved,) = (root / "trash").glob(f"*/{shard}/disk")
        subprocess.run(["umount", "--lazy", str(moved)], check=True, timeout=30)


def cleared(root: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "quire.cli", "store", "clear", "--yes", f"file://{root}"]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def test_a_pipe_in_a_pages_place_holds_nobody_up(serial, pages, tmp_path):
    store = serial()
    pages.put(store, 1, 2)
    (path,) = (tmp_path / "store/objects").rglob(f"{pages.key(1).hex()}*")
    path.unlink()
    os.mkfifo(path)
    assert pages.get(store, 1, 2) == [FAILED, OK]


def test_unfinished_files_of_dead_writers_are_removed_and_of_live_ones_kept(
    file_store, tmp_path, pages
):
    live = Layout(tmp_path / "store", must_exist=False)
    dead = Layout(tmp_path / "store", must_exist=False)
    text = f"{pages.key(1).hex()}.full.0of1"
    kept, stale = Path(live.temporary_path(text, 0)), Path(dead.temporary_path(text, 0))
    kept.touch()
    stale.touch()
    dead.close()
    file_store()
    assert kept.exists()
    assert not stale.exists()
    live.close()


def test_version_mismatch_in_an_object_is_a_miss_and_stays(client, file_store, pages, monkeypatch):
    store = client(file_store())
    with monkeypatch.context() as patch:
        patch.setattr("quire.store.codec.FORMAT_VERSION", 2)
        pages.put(store, 1)
    assert pages.get(store, 1) == [MISS]
    assert counted(store, "mismatch") == {Mismatch.VERSION: 1}
    assert len(file_store.object_files()) == 1


# ---- clearing -------------------------------------------------------------------------------


@pytest.fixture
def nobody_deletes(monkeypatch):
    """Mock: whoever should delete what was cleared was killed, or has a million files to go."""
    with monkeypatch.context() as patch:
        patch.setattr("quire.store.file.layout.Layout.empty_trash", lambda self: iter(()))
        yield patch


def test_what_was_cleared_is_gone_at_once_for_everybody_c18(
    client, file_store, pages, nobody_deletes
):
    one, two = client(file_store()), client(file_store())
    pages.put(one, *range(20))
    one.clear()
    assert pages.get(one, 1, 2) == pages.get(two, 1, 2) == [MISS, MISS]
    assert pages.put(two, 1) == [OK]
    assert pages.get(one, 1, 2) == [OK, MISS]


def test_what_was_cleared_is_deleted_by_the_next_and_counts_until_then_c18(
    serial, file_store, pages, nobody_deletes
):
    limit = 6 * pages.object_bytes
    first = serial(max_bytes=limit)
    pages.put(first, *range(6))
    first.clear()
    assert first._store.stats().used_bytes == limit
    first.close()
    nobody_deletes.undo()
    second = serial(max_bytes=limit)
    assert second._store.stats().used_bytes == 0
    assert list((file_store.root / "trash").iterdir()) == []
    assert pages.put(second, *range(6)) == [OK] * 6


def test_a_full_store_that_is_being_cleared_takes_writes_within_its_budget_c18(
    serial, file_store, pages, monkeypatch
):
    """Mock: it holds so much that nobody waits until all that was cleared is deleted."""
    monkeypatch.setattr("quire.store.file.scan.Scanner._scan", lambda self, pause_s: 0)
    monkeypatch.setattr("quire.store.file.scan.MAX_WAIT_OBJECTS", 0)
    limit = 6 * pages.object_bytes
    store = serial(max_bytes=limit)
    pages.put(store, *range(6))
    store.clear()
    for page in range(6):
        assert pages.put(store, page) == [OK]
        left = [path for path in (file_store.root / "trash").rglob("*") if path.is_file()]
        assert len(left) == 5 - page
    assert store._store.stats().used_bytes == limit


def test_a_page_being_written_while_the_store_is_cleared_fails_alone_c18(client, file_store, pages):
    files = file_store()
    store = client(files)
    write = files._io.write

    def cleared_meanwhile(fds, buffers):
        files._io.write = write
        store.clear()
        return write(fds, buffers)

    files._io.write = cleared_meanwhile
    assert pages.put(store, 1) == [FAILED]
    assert pages.put(store, 1) == [OK]
    assert pages.get(store, 1) == [OK]


def test_clearing_that_dies_half_way_leaves_a_store_that_works_c18(client, file_store, pages):
    store = client(file_store())
    pages.put(store, 1)
    os.rename(file_store.root / "objects", file_store.root / "trash/half.objects")
    assert pages.get(store, 1) == [MISS]
    assert pages.put(store, 1, 2) == [OK, OK]
    assert pages.get(client(file_store()), 1, 2) == [OK, OK]


# ---- opening --------------------------------------------------------------------------------


def test_directory_with_other_things_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(StoreError, match="not empty and not a Quire store: give an empty"):
        FileStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is a file, not a directory: give a directory"):
        FileStore(tmp_path / "file")


def test_missing_parent_is_refused(tmp_path):
    with pytest.raises(StoreError, match="does not exist: create it or correct the path"):
        FileStore(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_store_of_another_format_is_refused_untouched(tmp_path):
    (tmp_path / "quire-store.json").write_text('{"quire_store": 99}')
    with pytest.raises(StoreError, match=r"format 99.*give another directory"):
        FileStore(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("call", ["mkdir", "makedirs", "open", "statvfs"])
def test_unwritable_directory_is_one_sentence_with_the_fix(tmp_path, monkeypatch, call):
    """Mock: a system call is refused, since tests may run as root, whom nothing is refused."""

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "store").mkdir()
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StoreError, match=r"writable .*directory"):
        FileStore(tmp_path / "store")


# ---- administration -------------------------------------------------------------------------


def test_admin_lists_verifies_and_clears(client, file_store, pages, tmp_path):
    store = client(file_store())
    pages.put(store, *range(5))
    url = f"file://{tmp_path}/store"
    assert {item.name.key for item in maintenance.list_objects(url)} == set(pages.keys(*range(5)))
    seen: list[tuple[int, int]] = []
    report = maintenance.verify(url, progress=lambda done, total: seen.append((done, total)))
    assert (report.num_objects, report.num_ok, report.is_clean) == (5, 5, True)
    assert seen == [(n, 5) for n in range(1, 6)]
    file_store.damage(pages.key(3), 5000)
    os.truncate(next((tmp_path / "store").rglob(f"{pages.key(4).hex()}*")), 100)
    report = maintenance.verify(url)
    assert (report.mismatches, report.num_quarantined) == (
        {Mismatch.CHECKSUM: 1, Mismatch.LENGTH: 1},
        0,
    )
    assert maintenance.verify(url, quarantine=True).num_quarantined == 2
    assert maintenance.verify(url).is_clean
    assert maintenance.clear(url) == 3
    assert list(maintenance.list_objects(url)) == []


def test_admin_of_no_store_is_an_error_and_creates_nothing(tmp_path):
    with pytest.raises(StoreError, match="there is no store"):
        maintenance.verify(f"file://{tmp_path}/nothing")
    with pytest.raises(StoreError, match="there is no store"):
        list(maintenance.list_objects(f"file://{tmp_path}/nothing"))
    assert list(tmp_path.iterdir()) == []


def test_faulty_file_store_by_url(client, pages, tmp_path):
    store = client(open_store(f"faulty+file://{tmp_path}/store?seed=1&corrupt=1&reserve=0"))
    pages.put(store, *range(8))
    assert pages.get(store, *range(8)) == [CORRUPT] * 8
