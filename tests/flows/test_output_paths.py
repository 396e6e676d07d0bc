"""Where a command writes what it is asked for: never over a run, through a link or over another program's file."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import main
from fp8core.store.run_directory import RunDirectory

OTHERS = {"out": b"<!DOCTYPE html><html>my own page</html>", "json": b"{}"}
OUTPUTS = {
    "report --out": ["report", "RUN", "--out", "FILE"],
    "verify --json": ["verify", "RUN", "--tracking-uri", "none", "--json", "FILE"],
    "compare --json": ["compare", "RUN", "RUN", "--json", "FILE"],
    "replay --json": ["replay", "RUN", "--step", "0", "--json", "FILE"],
    "bisect --json": ["bisect", "RUN", "--prompts", "1", "--json", "FILE"],
    "evaluate --json": ["evaluate", "RUN", "--json", "FILE"],
    "plan --json": ["plan", "tiny", "--json", "FILE"],
    "run --json": ["run", "tiny", "--set", "steps=1", "--json", "FILE"],
    "resume --json": ["resume", "RUN", "--json", "FILE"],
}
# One of each kind of file.
WRITTEN = ["report --out", "verify --json"]
FOLDERS = {
    "export": ["export", "RUN", "FILE", "--step", "4"],
    "quantise": ["quantise", "RUN/checkpoints/00004/policy", "FILE"],
    "dequantise": ["dequantise", "RUN/checkpoints/00004/policy", "FILE"],
    "run": ["run", "tiny", "--set", "run=inner", "--set", "runs=FILE"],
}
Refused = Callable[..., None]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def words(command: list[str], run: Path, file: Path) -> list[str]:
    return [word.replace("RUN", str(run)).replace("FILE", str(file)) for word in command]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """A command ends with exit code 2 and one line that names the file, and changes nothing below `kept`."""
    monkeypatch.chdir(tmp_path)

    def check(command: list[str], run: Path, file: Path, kept: Path) -> None:
        before = contents(kept)
        assert main(words(command, run, file)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(file) in line
        assert contents(kept) == before

    return check


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_output_goes_into_a_run(name, run_copy, refused, tmp_path):
    folder = run_copy.folder
    weights = "checkpoints/00004/policy/model.safetensors"
    for inside in ("ledger.jsonl", "run.json", "lock", "manifests/00002.json", weights, "new.json"):
        refused([*OUTPUTS[name], "--force"], folder, folder / inside, folder)
    (tmp_path / "way").symlink_to(folder / "artifacts")
    refused(OUTPUTS[name], folder, tmp_path / "way" / "report.html", folder)


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_output_replaces_what_another_program_wrote_or_goes_through_a_link(name, whole_run, refused, tmp_path):
    other = tmp_path / "other.png"
    other.write_bytes(OTHERS[name.rpartition("--")[2]])
    refused(OUTPUTS[name], whole_run.folder, other, tmp_path)
    (tmp_path / "link.png").symlink_to(other)
    refused([*OUTPUTS[name], "--force"], whole_run.folder, tmp_path / "link.png", tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    refused([*OUTPUTS[name], "--force"], whole_run.folder, tmp_path / "pipe.png", tmp_path)


@pytest.mark.parametrize("name", FOLDERS)
def test_no_folder_is_made_in_a_run(name, run_copy, refused):
    refused(FOLDERS[name], run_copy.folder, run_copy.folder / "checkpoints" / "new", run_copy.folder)


@pytest.mark.parametrize("name", WRITTEN)
def test_an_output_replaces_one_of_its_own_kind_and_with_force_any(name, whole_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file.png"
    command = words(OUTPUTS[name], whole_run.folder, file)
    for before, flags in ((b"", []), (None, []), (OTHERS["json"], ["--force"])):
        if before is not None:
            file.write_bytes(before)
        assert main([*command, *flags]) == 0
        assert file.stat().st_size > 100
    # Another name of the file that is replaced keeps what it was.
    os.link(file, tmp_path / "second")
    second = (tmp_path / "second").stat().st_ino
    assert main(command) == 0
    assert file.stat().st_ino != second
    assert sorted(path.name for path in tmp_path.glob("*file*")) == ["file.png"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["plan", "tiny", "--json", "."], "--json .: cannot be written, because it is a folder; name a file"),
    ],
    ids=" ".join,
)
def test_a_name_that_no_output_can_have_is_refused(command, said, whole_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words(command, whole_run.folder, Path("one"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said.replace("FILE", "one") in line
    assert not [*tmp_path.iterdir()]


def test_a_report_in_the_folder_of_its_run_is_the_page_that_the_run_keeps(run_copy, monkeypatch):
    monkeypatch.chdir(run_copy.folder)
    for _ in range(2):
        assert main(["report", "."]) == 0
    assert (run_copy.folder / "report.html").is_file()


def test_the_folders_of_a_run_and_those_above_it_are_closed_to_other_users(tmp_path):
    folder = tmp_path / "project" / "runs" / "mine"
    RunDirectory.create_or_open(folder).close()
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "project").rglob("*") if path.is_dir()}
    assert folder / "artifacts" in modes
    assert set(modes.values()) == {0o700}, modes
