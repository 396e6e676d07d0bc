import hashlib
from pathlib import Path

import pytest

from fp8core.store.folder_digest import file_digest, folder_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "large").write_bytes(b"abc" * 200_000)
    (tmp_path / "small").write_bytes(b"x")
    return tmp_path


def test_a_file_is_digested_piece_by_piece(folder: Path) -> None:
    read = list[int]()
    assert file_digest(folder / "policy/large", read.append) == hashlib.sha256(b"abc" * 200_000).hexdigest()
    assert len(read) > 1
    assert sum(read) == 600_000


def test_a_folder_is_digested_by_the_names_and_contents_of_its_files(folder: Path) -> None:
    digests = [hashlib.sha256(content).hexdigest() for content in (b"abc" * 200_000, b"x")]
    expected = hashlib.sha256(f"policy/large\n{digests[0]}\nsmall\n{digests[1]}\n".encode()).hexdigest()
    read = list[int]()
    assert folder_digest(folder, read.append) == expected
    assert sum(read) == 600_001
    (folder / "small").rename(folder / "other")
    assert folder_digest(folder) != expected


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_digest(tmp_path / "absent")
