from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.deletion_log import Deletion, log_deletions, read_deletions


def deletion(letter: str, reason: str = "step 3 is not kept") -> Deletion:
    uri = f"artifacts/{letter * 2}/{letter * 64}.parquet"
    when = "2026-01-02T03:04:05+00:00"
    return Deletion(digest=letter * 64, uri=uri, kind="rollouts", size=7, step=3, reason=reason, when=when)


def test_deletions_come_back_by_digest_and_the_newest_wins(tmp_path: Path) -> None:
    assert read_deletions(tmp_path) == {}
    log_deletions(tmp_path, [deletion("a"), deletion("b")])
    log_deletions(tmp_path, [deletion("a", "orphan")])
    assert read_deletions(tmp_path) == {"a" * 64: deletion("a", "orphan"), "b" * 64: deletion("b")}


def test_a_line_torn_at_any_byte_does_not_count_and_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "tombstones.jsonl"
    log_deletions(tmp_path, [deletion("a")])
    whole = path.stat().st_size
    log_deletions(tmp_path, [deletion("b")])
    content = path.read_bytes()
    for length in range(whole, len(content), 23):
        path.write_bytes(content[:length])
        assert list(read_deletions(tmp_path)) == ["a" * 64]
        log_deletions(tmp_path, [deletion("c")])
        assert list(read_deletions(tmp_path)) == ["a" * 64, "c" * 64]


def test_the_name_of_the_file_and_the_lines_are_durable(tmp_path: Path, stored: list[tuple[str, Path]]) -> None:
    log_deletions(tmp_path, [deletion("a")])
    assert stored == [("sync", tmp_path), ("sync", tmp_path / "tombstones.jsonl")]


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    log_deletions(tmp_path, [deletion("a"), deletion("b")])
    path = tmp_path / "tombstones.jsonl"
    path.write_text(path.read_text().replace('"size":7', '"size":-7'))
    with pytest.raises(UserError, match=rf"^{path}:1: not a deletion: size: Input should be greater"):
        read_deletions(tmp_path)


def test_a_full_disk_is_one_line_and_adds_nothing(
    tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    log_deletions(tmp_path, [deletion("a")])
    with file_size_limit(400), pytest.raises(UserError, match=r"^cannot write .*/tombstones\.jsonl: File too large$"):
        log_deletions(tmp_path, [deletion("b"), deletion("c")])
    assert list(read_deletions(tmp_path)) == ["a" * 64]


def test_reading_a_removed_artifact_says_when_and_why(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    ref = store.put_json("notes", {"version": 1})
    removed = deletion("a").model_copy(update={"digest": ref.digest, "uri": ref.uri})
    log_deletions(tmp_path, [removed])
    assert store.get_json(ref) == {"version": 1}, "a file that is there can be read"
    store.path(ref).unlink()
    with pytest.raises(ArtifactError, match=r"removed by gc on 2026-01-02T03:04:05\+00:00 \(step 3 is not kept\)$"):
        store.get_json(ref)
    log_deletions(tmp_path, [deletion("b")])
    other = store.put_json("notes", {"version": 2})
    store.path(other).unlink()
    with pytest.raises(ArtifactError, match=r"the file is missing$"):
        store.get_json(other)
