import errno
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path

import pytest
from safetensors import SafetensorError

from fp8core.durable import (
    append_durably,
    ensure_file,
    folder_digest,
    make_folder,
    read_lines,
    refuse_unwritable,
    sweep,
    why_not_written,
    write_file,
)
from fp8core.errors import UserError


def test_write_file_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    write_file(path, b"one")
    write_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_ensure_file_writes_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    ensure_file(path, b"one")
    inode = path.stat().st_ino
    ensure_file(path, b"one")
    assert path.stat().st_ino == inode
    ensure_file(path, b"two")
    assert path.read_bytes() == b"two"


def test_content_is_durable_before_its_name_and_both_before_the_return(
    tmp_path: Path, stored: list[tuple[str, Path]]
) -> None:
    make_folder(tmp_path)
    stored.clear()
    write_file(tmp_path / "a.json", b"one")
    (what, temporary), *rest = stored
    assert (what, temporary.parent, temporary.suffix) == ("sync", tmp_path, ".tmp")
    assert rest == [("name", tmp_path / "a.json"), ("sync", tmp_path)]


def test_the_name_of_each_new_folder_is_durable_before_the_next_is_made(
    tmp_path: Path, stored: list[tuple[str, Path]]
) -> None:
    make_folder(tmp_path)
    stored.clear()
    make_folder(tmp_path / "a" / "b")
    assert stored == [("sync", tmp_path), ("sync", tmp_path / "a")]


def test_a_target_that_is_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^cannot write {tmp_path}: a folder lies in its place"):
        ensure_file(tmp_path, b"one")
    assert list(tmp_path.parent.glob(".*.tmp")) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can make one")
def test_a_folder_that_will_not_be_made_is_told_from_one_that_will(tmp_path: Path) -> None:
    """Permissions of /proc let root write there."""
    with pytest.raises(UserError, match=r"^cannot write in the folder /proc: "):
        refuse_unwritable(Path("/proc/runs/first"))
    refuse_unwritable(tmp_path / "runs" / "first")
    refuse_unwritable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sweep_takes_only_our_temporary_files(tmp_path: Path) -> None:
    keep = [tmp_path / "notes.tmp", tmp_path / ".hidden.tmp", tmp_path / "a.json"]
    orphans = [tmp_path / f".a.json.{'0' * 32}.tmp", tmp_path / "deep" / "er" / f".b.parquet.{'f' * 32}.tmp"]
    make_folder(tmp_path / "deep" / "er")
    for path in keep + orphans:
        path.touch()
    assert sweep(tmp_path, unchanged_seconds=60) == [], "somebody may be writing them"
    assert sweep(tmp_path) == orphans
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(keep)


def test_a_torn_last_line_is_none(tmp_path: Path) -> None:
    for tail in (b"to", b"\0" * 100_000, b'{"a' + b"\0" * 40 + b"\n"):
        (tmp_path / "f").write_bytes(b"first\n\nlast\n" + tail)
        assert read_lines(tmp_path / "f") == ([b"first", b"", b"last"], 12)


def test_an_append_that_fails_half_way_adds_nothing(
    tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    with FileIO(tmp_path / "f", "a") as file:
        append_durably(file, b"one\n")
        with file_size_limit(6), pytest.raises(OSError, match="File too large"):
            append_durably(file, b"two\nthree\n")
        append_durably(file, b"four\n")
    assert (tmp_path / "f").read_bytes() == b"one\nfour\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "large").write_bytes(b"abc" * 200_000)
    (tmp_path / "small").write_bytes(b"x")
    return tmp_path


def test_a_folder_is_digested_by_the_names_and_contents_of_its_files(tree: Path) -> None:
    digests = [hashlib.sha256(content).hexdigest() for content in (b"abc" * 200_000, b"x")]
    expected = hashlib.sha256(f"policy/large\n{digests[0]}\nsmall\n{digests[1]}\n".encode()).hexdigest()
    read = list[int]()
    assert folder_digest(tree, read.append) == expected
    assert sum(read) == 600_001
    (tree / "small").rename(tree / "other")
    assert folder_digest(tree) != expected


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/path"), "No space left on device; free space there"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "No space left"),
        (OSError(errno.EROFS, "Read-only file system", "/a/path"), "Read-only file system"),
        (SafetensorError("a tensor has two names"), "a tensor has two names"),
    ],
)
def test_the_reason_of_a_failed_write_has_no_path_and_says_what_helps(error, said):
    reason = why_not_written(error)
    assert reason.startswith(said)
    assert "/a/path" not in reason
    assert "os error" not in reason
    assert reason.endswith("; free space there, then go on") == ("No space" in said)
