from pathlib import Path

import pytest

from fp8core.errors import UserError
from fp8core.store.durable import ensure_file, make_folder, sweep, write_file


def test_write_file_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    write_file(path, b"one")
    write_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_reader_of_the_old_file_never_sees_a_mixture(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_file(path, b"one")
    with path.open("rb") as reader:
        write_file(path, b"two")
        assert reader.read() == b"one"


def test_ensure_file_writes_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    ensure_file(path, b"one")
    inode = path.stat().st_ino
    ensure_file(path, b"one")
    assert path.stat().st_ino == inode
    ensure_file(path, b"two")
    assert path.read_bytes() == b"two"


def test_a_target_that_is_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^cannot write {tmp_path}: Is a directory$"):
        ensure_file(tmp_path, b"one")
    assert list(tmp_path.parent.glob(".*.tmp")) == []


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"^cannot create the folder {tmp_path}/file: File exists$"):
        make_folder(tmp_path / "file" / "runs")


def test_sweep_takes_only_our_temporary_files(tmp_path: Path) -> None:
    keep = [tmp_path / "notes.tmp", tmp_path / ".hidden.tmp", tmp_path / "a.json"]
    orphans = [tmp_path / f".a.json.{'0' * 32}.tmp", tmp_path / "deep" / "er" / f".b.parquet.{'f' * 32}.tmp"]
    make_folder(tmp_path / "deep" / "er")
    for path in keep + orphans:
        path.touch()
    assert sweep(tmp_path) == orphans
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(keep)
