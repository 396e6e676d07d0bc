import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue, TypeAdapter

from fp8core.store.versions import code_version, git_state, hardware, library_versions


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "core"
    (folder / "part").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "part" / "a.py").write_text("one = 1\n")
    return folder


def test_code_version_covers_names_and_contents_of_sources_alone(package: Path, tmp_path: Path) -> None:
    version = code_version(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.cpython-311.pyc").touch()
    (package / "notes.txt").touch()
    assert code_version(package) == version
    copy = shutil.copytree(package, tmp_path / "installed" / "core")
    assert code_version(copy) == version
    (package / "part" / "a.py").write_text("one = 2\n")
    changed = code_version(package)
    (package / "part" / "a.py").rename(package / "part" / "b.py")
    assert len({version, changed, code_version(package)}) == 3


def test_code_version_of_several_packages_does_not_depend_on_their_order(package: Path) -> None:
    other = shutil.copytree(package, package.parent / "tasks")
    assert code_version(package, other) == code_version(other, package)
    assert len({code_version(package, other), code_version(package), code_version(other)}) == 3


def test_library_versions_name_what_is_installed() -> None:
    versions = library_versions()
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == torch.__version__
    assert {"numpy", "pyarrow"} <= set(versions)


def test_a_library_that_is_absent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8core.store.versions._LIBRARIES", ("torch", "no-such-library"))
    assert set(library_versions()) == {"python", "torch"}


def test_hardware_is_json_and_plausible() -> None:
    found = hardware()
    TypeAdapter(dict[str, JsonValue]).validate_python(found)
    assert found["machine"] == platform.machine()
    assert isinstance(found["memory"], int)
    assert 2**28 < found["memory"] < 2**50


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_state_of_a_checkout(package: Path) -> None:
    checkout = package.parent
    assert git_state(package) == {}
    git(checkout, "init")
    assert git_state(package) == {}
    git(checkout, "add", ".")
    assert git_state(package) == {}, "no commit yet"
    git(checkout, "commit", "-m", "first")
    assert git_state(package) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}
    (package / "__init__.py").write_text("changed = True\n")
    assert git_state(package)["dirty"] is True


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_folder_that_the_checkout_around_it_does_not_track_has_no_state(package: Path) -> None:
    checkout = package.parent
    (checkout / ".gitignore").write_text("core/\n")
    git(checkout, "init")
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "first")
    assert git_state(package) == {}
    assert git_state(checkout) != {}


def test_without_git_there_is_no_state(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_state(package) == {}
