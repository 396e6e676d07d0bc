"""The examples of docs/extending.md: the test of a section writes its blocks to files and runs them."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fp8core", "tasks", "flows", "configs")


def blocks(title: str) -> Iterator[tuple[str, str]]:
    """Language and text of each block of a section."""
    page = (ROOT / "docs" / "extending.md").read_text()
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section is not None, f"the page has no section {title}"
    return iter(re.findall(r"^```(python|yaml|diff)\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL))


def write_section(title: str, folder: Path) -> None:
    """Files are named by the comment in their first line; differences change files that are there."""
    for language, text in blocks(title):
        if language == "diff":
            subprocess.run(["patch", "-p1", "--no-backup-if-mismatch"], cwd=folder, input=text, text=True, check=True)
            continue
        name = re.match(r"# (\S+)\n", text)
        assert name is not None, f"a block of {title} does not name its file"
        (folder / name[1]).write_text(text)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write a section's files into the working directory of a user, where imports find them."""

    def write(title: str) -> Path:
        write_section(title, tmp_path)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        for file in tmp_path.glob("*.py"):
            monkeypatch.delitem(sys.modules, file.stem, raising=False)
        return tmp_path

    return write


@pytest.fixture
def changed_package(tmp_path: Path) -> Callable[[str], Callable[..., str]]:
    """Change a copy of the package by a section: gives a function that runs Python in it and returns what it prints."""

    def change(title: str) -> Callable[..., str]:
        folder = tmp_path / "package"
        for name in PACKAGES:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        write_section(title, folder)

        def run(*arguments: str) -> str:
            command = [sys.executable, *arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            return done.stdout

        return run

    return change
