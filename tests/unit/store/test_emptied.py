"""A directory that somebody empties while it is open: `rm -rf DIR/*`, or parts of it. It goes on as
an empty store, for this process and for others, or says no; never a wrong page."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.errors import StoreError
from quire.store.codec import object_name
from quire.store.file import FileStore
from quire.types import Owner, PageStatus
from unit.store.conftest import counted

OK, MISS, CORRUPT, FAILED = PageStatus.OK, PageStatus.MISS, PageStatus.CORRUPT, PageStatus.FAILED
ROOM = 6


def empty(root: Path) -> None:
    for path in sorted(root.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.fixture
def root(file_store) -> Path:
    return file_store.root


@pytest.mark.parametrize("removed", [empty, shutil.rmtree])
@pytest.mark.parametrize("room", [ROOM, 1000])
def test_it_goes_on_as_an_empty_store_which_others_can_open(
    client, file_store, pages, removed, room
):
    """Full or not."""
    limit = room * pages.object_bytes
    cache = client(file_store(max_bytes=limit))
    pages.put_path(cache, *range(1, ROOM + 1))
    removed(file_store.root)
    assert pages.get(cache, 1, 2) == [MISS, MISS]
    assert pages.put_path(cache, 7, 8, after=6) == [PageStatus.ORPHAN] * 2
    assert pages.put_path(cache, *range(11, 11 + ROOM)) == [OK] * ROOM
    assert pages.usable(cache, *range(11, 11 + ROOM)) == ROOM
    other = client(file_store(max_bytes=limit))
    assert pages.get(other, 1, 11, 12) == [MISS, OK, OK]
    assert counted(cache, "error") == counted(cache, "mismatch") == {}


def test_where_no_directory_is_any_more_the_store_does_not_answer(client, pages, root, file_store):
    """And is not taken for one that has nothing."""
    cache = client(file_store())
    pages.put_path(cache, 1, 2)
    away = root.rename(root.with_name("away"))
    root.touch()
    for _ in range(20):
        assert pages.usable(cache, 1, 2) == 0
    assert not cache.health()[0].answers
    assert counted(cache, "error") != {}
    root.unlink()
    away.rename(root)


def test_who_has_a_quota_writes_on(client, file_store, pages, root):
    cache = client(file_store(max_bytes=ROOM * pages.object_bytes))
    owner = Owner("aa", 0.5)
    pages.put_path(cache, 1, 2, owner=owner)
    empty(root)
    for first in (11, 21, 31):
        assert pages.put_path(cache, first, first + 1, owner=owner) == [OK, OK]
        assert len(file_store.object_files()) <= ROOM // 2
    assert pages.usable(cache, 31, 32) == 2


def test_accounts_of_owners_make_no_directory_that_nobody_could_open(file_store, root):
    """What removed it came after the writer had looked, and the writer ends here."""
    store = file_store()
    shutil.rmtree(root)
    with pytest.raises(FileNotFoundError):
        store._owners.wrote(Owner("aa", 0.5), [("x", 1)])
    FileStore(root).close()


def test_all_that_had_it_open_keep_one_budget_and_names_of_their_own(
    client, file_store, pages, root
):
    """One of them was there before, and has not noticed when the next opens the directory."""
    limit = ROOM * pages.object_bytes
    before = file_store(max_bytes=limit)
    old = client(before)
    pages.put(old, *range(ROOM))
    empty(root)
    after = file_store(max_bytes=limit)
    new = client(after)
    for n in range(100, 120):
        assert pages.put(old if n % 2 else new, n) == [OK]
        # What changes while a scan counts is counted by half.
        assert len(file_store.object_files()) <= ROOM + 2
    paths = [store._layout.temporary_path("ab.full.0of1", 0) for store in (before, after)]
    assert len(set(paths)) == 2


def test_who_was_writing_meanwhile_does_not_publish_what_another_writes(
    client, file_store, pages, root
):
    """Another process opened the emptied directory, and has the number that was ours before."""
    files = file_store()
    cache, write = client(files), files._io.write
    halves: list[Path] = []

    def emptied_meanwhile(fds, buffers):
        files._io.write = write
        empty(root)
        other = file_store()
        halves.append(Path(other._layout.temporary_path(text, 0)))
        halves[0].write_bytes(bytes(pages.object_bytes))
        return write(fds, buffers)

    text = object_name(pages.part, pages.key(1)).text
    files._io.write = emptied_meanwhile
    assert pages.put(cache, 1) == [FAILED]
    assert halves[0].exists()
    assert pages.get(cache, 1) == [MISS]


def test_what_somebody_else_keeps_there_by_now_is_left_alone(client, file_store, pages, root):
    cache = client(file_store())
    pages.put(cache, 1)
    empty(root)
    (root / "thesis.tex").write_text("mine")
    assert pages.put(cache, 1, 2) == [FAILED, FAILED]
    assert pages.get(cache, 1) == [MISS]
    assert counted(cache, "error") == {"StoreError": 1}
    assert [path.name for path in root.iterdir()] == ["thesis.tex"]
    (root / "thesis.tex").unlink()
    assert pages.put(cache, 1, 2) == [OK, OK]


def test_a_page_being_written_meanwhile_fails_alone(client, file_store, pages, root):
    files = file_store()
    cache, write = client(files), files._io.write

    def emptied_meanwhile(fds, buffers):
        files._io.write = write
        empty(root)
        return write(fds, buffers)

    files._io.write = emptied_meanwhile
    assert pages.put(cache, 1) == [FAILED]
    assert pages.put(cache, 1) == [OK]
    assert pages.get(client(file_store()), 1) == [OK]


@pytest.mark.parametrize("folder", ["quarantine", "trash", "state", "objects"])
def test_a_folder_that_is_missing_is_made_when_it_is_needed(
    client, file_store, pages, root, folder
):
    cache = client(file_store(max_bytes=ROOM * pages.object_bytes))
    pages.put(cache, 1, 2)
    shutil.rmtree(root / folder, ignore_errors=True)
    assert pages.put(cache, 1, 2) == [OK, OK]
    file_store.damage(pages.key(1), 5000)
    assert pages.get(cache, 1, 2) == [CORRUPT, OK]
    assert pages.put(cache, 1) == [OK]
    shutil.rmtree(root / folder, ignore_errors=True)
    cache.clear()
    assert pages.get(cache, 1, 2) == [MISS, MISS]
    shutil.rmtree(root / folder, ignore_errors=True)
    for n in range(10, 30):
        assert pages.put(cache, n) == [OK]


def test_where_its_disk_was_mounted_nothing_is_written(client, tmp_path, pages):
    """It would fill another disk. Needs root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "quire-tests", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("a disk of its own cannot be made here")
    unmount = ["umount", "--lazy", str(disk)]
    try:
        cache = client(FileStore(disk / "pages", reserve_bytes=0))
        assert pages.put(cache, 1) == [OK]
        aside = tmp_path / "aside"
        aside.mkdir()
        subprocess.run(["mount", "--bind", str(disk), str(aside)], check=True, timeout=30)
        subprocess.run(unmount, check=True, timeout=30)
        try:
            assert pages.put(cache, 2) == [FAILED]
            assert pages.get(cache, 1) == [MISS]
            assert list(disk.iterdir()) == []
        finally:
            subprocess.run(["mount", "--bind", str(aside), str(disk)], check=True, timeout=30)
            subprocess.run([*unmount[:2], str(aside)], check=True, timeout=30)
        assert pages.put(cache, 2) == [OK]
        assert pages.get(cache, 1, 2) == [OK, OK]
    finally:
        subprocess.run(unmount, check=True, timeout=30)


def test_what_a_writer_made_anew_while_it_was_emptied_is_opened_again(
    client, file_store, pages, root
):
    """The marker went last, and nobody writes any more who would put it back."""
    store = file_store()
    pages.put(client(store), 1)
    next(root.glob("*.json")).unlink()
    for folder in ("state", "trash"):
        shutil.rmtree(root / folder)
    store.close()
    cache = client(FileStore(root))
    assert pages.put(cache, 2) == [OK]
    assert pages.get(cache, 1, 2) == [OK, OK]


@pytest.mark.parametrize("place", ["objects/thesis.tex", "objects/ab/../pack/x", "thesis.tex"])
def test_folders_of_somebody_elses_are_not_taken_for_what_is_left_of_a_store(tmp_path, place):
    path = tmp_path / place
    (tmp_path / "objects" / "ab").mkdir(parents=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(StoreError, match="is not empty and not a Quire store"):
        FileStore(tmp_path)
    assert not list(tmp_path.glob("*.json"))


def test_the_marker_alone_is_put_back(client, file_store, pages, root):
    cache = client(file_store())
    pages.put(cache, 1)
    next(root.glob("*.json")).unlink()
    assert pages.put(cache, 2) == [OK]
    assert pages.get(client(FileStore(root)), 1, 2) == [OK, OK]
