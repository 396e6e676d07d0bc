import errno
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from io import FileIO
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from fp8core import durable
from fp8core.durable import (
    PRIVATE,
    append_durably,
    ensure_copy,
    ensure_file,
    file_digest,
    folder_digest,
    io_seconds,
    io_timer,
    lines_backward,
    lines_forward,
    make_folder,
    partial_folder,
    refuse_unwritable,
    remove_folder,
    sole_file,
    sweep,
    whole_end,
    why_not_written,
    write_file,
)
from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactError, ArtifactStore, RolloutShards


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


def test_content_is_durable_before_its_name_and_both_before_the_return(
    tmp_path: Path, stored: list[tuple[str, Path]]
) -> None:
    make_folder(tmp_path)
    stored.clear()
    write_file(tmp_path / "a.json", b"one")
    (what, temporary), *rest = stored
    assert (what, temporary.parent, temporary.suffix) == ("sync", tmp_path, ".tmp")
    assert rest == [("name", tmp_path / "a.json"), ("sync", tmp_path)]


def test_a_file_whose_writer_was_killed_before_its_name_was_durable_gets_a_durable_one(
    tmp_path: Path, stored: list[tuple[str, Path]]
) -> None:
    (tmp_path / "source").write_bytes(b"one")
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "a.json"
    path.write_bytes(b"one")
    for ensure in (
        lambda: ensure_file(path, b"one"),
        lambda: ensure_copy(path, tmp_path / "source", file_digest(path)),
    ):
        stored.clear()
        ensure()
        assert stored == [("sync", tmp_path / "folder")]


def test_the_name_of_each_new_folder_is_durable_before_the_next_is_made(
    tmp_path: Path, stored: list[tuple[str, Path]]
) -> None:
    make_folder(tmp_path)
    stored.clear()
    make_folder(tmp_path / "a" / "b")
    assert stored == [("sync", tmp_path), ("sync", tmp_path / "a")]


def test_a_folder_whose_maker_was_killed_before_its_name_was_durable_gets_a_durable_one(
    tmp_path: Path, stored: list[tuple[str, Path]]
) -> None:
    (tmp_path / "a").mkdir()
    make_folder(tmp_path / "a")
    assert stored == [("sync", tmp_path)]
    make_folder(tmp_path / "a")
    write_file(tmp_path / "a" / "file", b"one")
    assert stored.count(("sync", tmp_path)) == 1, "once in a process"
    shutil.rmtree(tmp_path / "a")
    make_folder(tmp_path / "a")
    assert stored.count(("sync", tmp_path)) == 2, "and again for one that is made anew"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_in_one_that_may_not_be_read_is_used(tmp_path: Path) -> None:
    (tmp_path / "home" / "own").mkdir(parents=True)
    (tmp_path / "home").chmod(0o311)
    try:
        write_file(tmp_path / "home" / "own" / "file", b"one")
    finally:
        (tmp_path / "home").chmod(0o700)


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="needs a mount")
def test_the_name_of_a_mount_is_not_synced(stored: list[tuple[str, Path]]) -> None:
    """The file system above may be one that nobody can write to, or sync."""
    make_folder(Path("/proc"))
    assert stored == []


def test_missing_parents_have_the_mode_of_the_folder(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b", PRIVATE)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")} == {PRIVATE}


def test_a_file_with_a_second_name_is_not_opened_for_changes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one")
    os.close(sole_file(tmp_path / "file", os.O_RDWR))
    os.link(tmp_path / "file", tmp_path / "other")
    with pytest.raises(OSError, match=r"the file has 2 names"):
        sole_file(tmp_path / "file", os.O_RDWR)


def test_a_folder_whose_removal_is_cut_short_is_gone_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "00002"
    write_file(folder / "file", b"one")

    def cut_short(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", cut_short)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(folder)
    assert list(tmp_path.iterdir()) == [partial_folder(folder)]


def test_a_target_that_is_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^cannot write {tmp_path}: a folder lies in its place"):
        ensure_file(tmp_path, b"one")
    assert list(tmp_path.parent.glob(".*.tmp")) == []


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"^cannot create the folder {tmp_path}/file: File exists$"):
        make_folder(tmp_path / "file" / "runs")


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
    assert sweep(tmp_path) == orphans
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(keep)


def test_sweep_leaves_what_another_is_writing(tmp_path: Path) -> None:
    with durable._replaced(tmp_path / "a.json") as file:
        file.write(b"new")
        assert sweep(tmp_path) == []
    assert (tmp_path / "a.json").read_bytes() == b"new"


def test_a_file_that_takes_its_name_during_a_sweep_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / f".a.json.{'0' * 32}.tmp"
    temporary.touch()
    walk = os.walk

    def renamed_after(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        yield from walk(folder)
        temporary.replace(tmp_path / "a.json")

    monkeypatch.setattr("os.walk", renamed_after)
    assert sweep(tmp_path) == []
    assert (tmp_path / "a.json").exists()


def test_writers_and_sweeps_beside_each_other_do_not_fail(tmp_path: Path) -> None:
    ends = threading.Event()

    def sweep_on() -> int:
        swept = 0
        while not ends.is_set():
            swept += len(sweep(tmp_path))
        return swept

    with ThreadPoolExecutor(2) as pool:
        sweeping = [pool.submit(sweep_on) for _ in range(2)]
        try:
            for _ in range(300):
                write_file(tmp_path / "a.json", b"one")
        finally:
            ends.set()
    assert all(each.result() >= 0 for each in sweeping)


LENGTHS = st.lists(st.sampled_from([0, 1, 17, 65_534, 65_535, 65_536, 65_537, 140_000]), max_size=6)


def located(content: bytes) -> list[tuple[int, bytes]]:
    """What newlines separate, with offsets."""
    pieces = content.split(b"\n")
    return [(sum(len(piece) + 1 for piece in pieces[:i]), piece) for i, piece in enumerate(pieces)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS, st.sampled_from([0, 3, 65_536, 70_000]))
def test_both_directions_give_the_lines_wherever_blocks_end(tmp_path: Path, lengths: list[int], torn: int) -> None:
    content = b"".join(b"%c" % (97 + i) * length + b"\n" for i, length in enumerate(lengths)) + b"t" * torn
    (tmp_path / "f").write_bytes(content)
    expected = located(content)
    with FileIO(tmp_path / "f") as file:
        assert list(lines_backward(file, len(content))) == expected[::-1]
        assert list(lines_forward(file, 0, len(content))) == expected[:-1]
        assert whole_end(file) == len(content) - torn
        for begin, _ in expected:
            assert list(lines_forward(file, begin, len(content))) == [
                line for line in expected[:-1] if line[0] >= begin
            ]


def test_only_as_much_is_read_as_is_asked(tmp_path: Path) -> None:
    hole = 1 << 40
    with (tmp_path / "f").open("wb") as sparse:
        sparse.write(b"first\n")
        sparse.seek(hole)
        sparse.write(b"\nlast\n")
    with FileIO(tmp_path / "f") as file:
        assert next(lines_forward(file, 0, hole + 6)) == (0, b"first")
        assert list(islice(lines_backward(file, hole + 6), 2)) == [(hole + 6, b""), (hole + 1, b"last")]


def test_zeros_in_the_last_line_make_it_torn(tmp_path: Path) -> None:
    for tail in (b"\0" * 100_000, b'{"a' + b"\0" * 40 + b"\n"):
        (tmp_path / "f").write_bytes(b"whole\n" + tail)
        with FileIO(tmp_path / "f") as file:
            assert whole_end(file) == 6


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


def test_a_file_is_digested_piece_by_piece(tree: Path) -> None:
    read = list[int]()
    assert file_digest(tree / "policy/large", read.append) == hashlib.sha256(b"abc" * 200_000).hexdigest()
    assert len(read) > 1
    assert sum(read) == 600_000


def test_a_folder_is_digested_by_the_names_and_contents_of_its_files(tree: Path) -> None:
    digests = [hashlib.sha256(content).hexdigest() for content in (b"abc" * 200_000, b"x")]
    expected = hashlib.sha256(f"policy/large\n{digests[0]}\nsmall\n{digests[1]}\n".encode()).hexdigest()
    read = list[int]()
    assert folder_digest(tree, read.append) == expected
    assert sum(read) == 600_001
    (tree / "small").rename(tree / "other")
    assert folder_digest(tree) != expected


def test_a_folder_with_a_link_to_another_has_no_digest(tree: Path) -> None:
    (tree / "link").symlink_to(tree / "policy", target_is_directory=True)
    with pytest.raises(OSError, match="it is a symbolic link"):
        folder_digest(tree)


@io_timer()
def _outer():
    with io_timer():
        time.sleep(0.02)
    time.sleep(0.02)


def test_nested_blocks_count_once_and_nothing_else_counts():
    before = io_seconds()
    _outer()
    _outer()
    between = io_seconds() - before
    time.sleep(0.02)
    assert 0.08 <= between == io_seconds() - before


def test_other_threads_do_not_count():
    before = io_seconds()
    thread = threading.Thread(target=_outer)
    thread.start()
    thread.join()
    assert io_seconds() == before


def test_what_a_store_does_counts_also_when_it_fails(tmp_path):
    store, readings = ArtifactStore(tmp_path), [io_seconds()]
    ref = store.put_table("notes", pa.table({"tokens": list(range(20_000))}))
    readings.append(io_seconds())
    store.get_table(ref)
    readings.append(io_seconds())
    store.path(ref).unlink()
    with pytest.raises(ArtifactError):
        store.get_table(ref)
    readings.append(io_seconds())
    RolloutShards(tmp_path / "shards").append(pa.table({"tokens": [1]}))
    readings.append(io_seconds())
    assert readings == sorted(set(readings))


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
