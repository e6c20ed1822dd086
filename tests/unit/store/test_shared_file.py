"""A file that processes lock in turn, of which somebody removes the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quire.store.file.shared_file import SharedFile


def test_who_finds_no_folder_any_more_keeps_nobody_else_waiting(tmp_path: Path):
    """Both have had the file open since before."""
    folder = tmp_path / "state"
    folder.mkdir()
    first, second = (SharedFile(str(folder / "used_bytes")) for _ in range(2))
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError), first.locked():
        pass
    folder.mkdir()
    with second.locked(wait=False) as is_mine:
        assert is_mine
    with first.locked(wait=False) as is_mine:
        assert is_mine
    for file in (first, second):
        file.close()
