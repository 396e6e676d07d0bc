import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path

import pytest

from fp8core.durable import append_durably, folder_digest, make_folder, read_lines, write_file


def test_content_is_durable_before_its_name_and_both_before_the_return(
    tmp_path: Path, stored: list[tuple[str, Path]]
) -> None:
    make_folder(tmp_path)
    stored.clear()
    write_file(tmp_path / "a.json", b"one")
    (what, temporary), *rest = stored
    assert (what, temporary.parent, temporary.suffix) == ("sync", tmp_path, ".tmp")
    assert rest == [("name", tmp_path / "a.json"), ("sync", tmp_path)]


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
