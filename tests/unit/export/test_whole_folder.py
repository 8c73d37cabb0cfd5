"""A folder appears whole or not at all."""

import fcntl
import os
from pathlib import Path

import pytest

from dflash_cache.errors import DiskSpaceError, OutputExistsError
from dflash_cache.export.folder import whole_folder


def test_appears_with_its_files(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "result"
    with whole_folder(target) as unfinished:
        (unfinished / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in target.parent.iterdir()] == ["result"]


def test_errors_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "result") as unfinished:
        (unfinished / "a").write_text("1")
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_full_disk_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(DiskSpaceError, match="result"), whole_folder(tmp_path / "result"):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_processes_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    dead, living, other = (tmp_path / name for name in (".result-00000000", ".result-11111111", ".result2-00000000"))
    for folder in (dead, living, other):
        folder.mkdir()
    handle = os.open(living, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with whole_folder(tmp_path / "result"):
            pass
    finally:
        os.close(handle)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".result-11111111", ".result2-00000000", "result"]


def test_what_is_there_is_kept_unless_replaceable(tmp_path: Path) -> None:
    target = tmp_path / "result"
    target.mkdir()
    with whole_folder(target) as unfinished:  # an empty folder is as good as none
        (unfinished / "a").write_text("1")
    with pytest.raises(OutputExistsError), whole_folder(target):
        pass
    with whole_folder(target, replaceable=lambda folder: (folder / "a").exists()) as unfinished:
        (unfinished / "b").write_text("2")
    assert [path.name for path in target.iterdir()] == ["b"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputExistsError, match="not a folder"), whole_folder(tmp_path / "file"):
        pass
