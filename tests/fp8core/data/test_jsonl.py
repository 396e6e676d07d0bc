import gzip
import re
from pathlib import Path

import pytest

from fp8core.data.jsonl import read_jsonl
from fp8core.data.prompt import problem
from fp8core.errors import UserError

GOOD = b'{"question": "2+2=?", "answer": "#### 4"}\n'


def write(folder: Path, content: bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_rows_in_file_order_with_answers_as_text(tmp_path: Path) -> None:
    content = GOOD + b'\n{"q": 1, "question": "a\\u2028b\xe2\x80\xa8", "answer": "x\\n#### 1,234"}'
    expected = [problem("2+2=?", "#### 4"), problem("a\u2028b\u2028", "x\n#### 1,234")]
    assert read_jsonl(write(tmp_path, content), "question", "answer") == expected
    compressed = write(tmp_path, gzip.compress(content), "rows.jsonl.gz")
    assert read_jsonl(compressed, "question", "answer") == expected


def test_field_names_are_the_callers(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"Frage": "x", "Antwort": "y"}')
    assert read_jsonl(path, "Frage", "Antwort") == [problem("x", "y")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "x", ', "not JSON (Expecting property name"),
        (b"[1, 2]", "the row is list, not an object"),
        (b'{"question": "x"}', "no field 'answer'"),
        (b'{"question": "x", "answer": 4}', "field 'answer' is int, not text"),
        (b'{"question": "", "answer": "4"}', "field 'question' is empty"),
        (b'{"question": "\xff", "answer": "4"}', "not UTF-8 (byte 15 of the line)"),
        (b'{"question": "\\ud800", "answer": "4"}', "field 'question' holds half a surrogate pair"),
        (b'{"question": ' + b"9" * 5000 + b"}", "JSON beyond limits"),
        (b"[" * 200_000, "JSON beyond limits"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path, GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(UserError, match=re.escape(f"{path}:3: {message}")) as caught:
        read_jsonl(path, "question", "answer")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl: the file has no rows"):
        read_jsonl(write(tmp_path, content), "question", "answer")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    for name, message in [("none.jsonl", "no such file"), ("folder.jsonl", "Is a directory"), ("x.csv", "only .jsonl")]:
        with pytest.raises(UserError, match=f"{name}: .*{message}"):
            read_jsonl(tmp_path / name, "question", "answer")


def test_damaged_compression_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(GOOD * 3)
    broken = whole[:12] + bytes([whole[12] ^ 0xFF]) + whole[13:]
    for content in (whole[:-12], GOOD, broken):
        with pytest.raises(UserError, match=r"rows\.jsonl\.gz: damaged gzip data"):
            read_jsonl(write(tmp_path, content, "rows.jsonl.gz"), "question", "answer")
