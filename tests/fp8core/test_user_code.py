"""Code of the user's own: which file is executed and digested, and what other modules its name may not touch."""

import decimal
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8core.errors import UserError
from fp8core.user_code import digest_of_code, file_of, find_neighbours, load_code

Written = Callable[[str, str], str]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    """Write a file of a name; returns the path of its function `score`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}

    def write(name: str, source: str) -> str:
        (tmp_path / name).write_text(source)
        return f"{tmp_path / name}:score"

    yield write
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["decimal.py", "this.py"])
def test_a_file_with_the_name_of_a_library_hides_none(written: Written, name: str) -> None:
    """One that is imported already, and one that is not."""
    library = name.removesuffix(".py")
    before = sys.modules.get(library)
    source = f"import {library}, fractions\ndef score(): return {library}.__file__, fractions.Fraction('0.5')"
    code = load_code(written(name, source), "function")
    assert (file_of(code.target), code.file.name) == (str(code.file), name)
    library_file, half = code.target()
    assert Path(library_file).parent == Path(decimal.__file__).parent
    assert half == 0.5
    assert before is None or sys.modules[library] is before
    assert Path(str(importlib.import_module(library).__file__)) != code.file


def test_the_digest_is_of_the_bytes_that_were_executed(written: Written, tmp_path: Path) -> None:
    changes = "from pathlib import Path\nPath(__file__).write_text('def score(): return 2')\ndef score(): return 1"
    path = written("changing.py", changes)
    code = load_code(path, "function")
    assert code.target() == 1
    assert code.digest == hashlib.sha256(changes.encode()).hexdigest()
    again = load_code(path, "function")
    assert again.target() == 2
    assert (again.file, again.digest) == digest_of_code(path)


def test_a_file_of_the_same_name_in_another_folder_is_another_module(written: Written, tmp_path: Path) -> None:
    first = load_code(written("mine.py", "def score(): return 1"), "function").target
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("def score(): return 2")
    second = load_code(f"{tmp_path / 'other' / 'mine.py'}:score", "function").target
    assert (first(), second()) == (1, 2)
    assert first.__module__ != second.__module__


def test_neighbours_are_found_where_they_were_asked_for_alone(written: Written) -> None:
    """They are in no digest, and another file there may answer the optional import of a library."""
    written("scale_of_mine.py", "SCALE = 2")
    path = written("mine.py", "import scale_of_mine\ndef score(): return scale_of_mine.SCALE")
    with pytest.raises(UserError, match="No module named 'scale_of_mine'"):
        load_code(path, "function")
    find_neighbours(path)
    assert load_code(path, "function").target() == 2
