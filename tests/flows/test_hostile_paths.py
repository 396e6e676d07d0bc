"""Links, FIFOs and folders in the place of a run's files: nothing outside the run changes, and no command hangs."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.cli import main
from flows.tracking.record import RECORD
from fp8core.errors import StoredFileError
from fp8core.store.layout import LEDGER

NARROW = ["--set", "artifacts.keep={last: 1, every: null}"]
DECOY = b"what somebody else wrote\n"

Command = Callable[..., str]


@pytest.fixture(autouse=True)
def _ended_when_it_hangs() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the command hangs"))
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Command:
    """The one line that a command ends with, by exit code 1."""

    def run(*words: object) -> str:
        assert main([str(word) for word in words]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


@pytest.fixture
def decoy(tmp_path: Path) -> Path:
    """A file that is not the run's."""
    path = tmp_path / "decoy"
    path.write_bytes(DECOY)
    return path


def place(path: Path, how: Callable[[Path, Path], None], target: Path) -> None:
    path.unlink(missing_ok=True)
    how(target, path)


@pytest.mark.parametrize("how", [os.symlink, os.link])
@pytest.mark.parametrize(("name", "words"), [("lock", []), ("tombstones.jsonl", ["--yes"])])
def test_gc_writes_into_no_other_file(name, words, how, run_copy, decoy, refused):
    place(run_copy.folder / name, how, decoy)
    assert name in refused("gc", run_copy.folder, *NARROW, *words)
    assert decoy.read_bytes() == DECOY
    assert all(run_copy.file(step, "rollouts").exists() for step in range(1, 5))


@pytest.mark.parametrize("how", [os.symlink, os.link])
def test_a_run_appends_to_no_ledger_of_another(how, run_copy, tmp_path):
    other = Path(shutil.copy(run_copy.folder / LEDGER, tmp_path / "other.jsonl"))
    before = other.read_bytes()
    place(run_copy.folder / LEDGER, how, other)
    with pytest.raises(StoredFileError, match=LEDGER), run_copy.opened(steps=5):
        pass
    assert other.read_bytes() == before


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/00002", "artifacts", "artifacts/??"])
def test_gc_removes_nothing_through_a_link(name, run_copy, tmp_path, refused):
    rollouts = run_copy.file(1, "rollouts")
    folder = rollouts.parent if name.endswith("??") else run_copy.folder / name
    elsewhere = Path(shutil.move(folder, tmp_path / "elsewhere"))
    folder.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    assert f"{folder}: it is a symbolic link" in refused("gc", run_copy.folder, *NARROW, "--yes")
    assert sorted(elsewhere.rglob("*")) == before


def test_gc_removes_no_folder_that_a_forged_ledger_names(run_copy, tmp_path, refused):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_bytes(DECOY)

    def forge(entry):
        if entry["event"] == "checkpoint" and entry["step"] == 2:
            entry["uri"] = str(victim)

    run_copy.rewrite(forge)
    assert f"{LEDGER}:" in refused("gc", run_copy.folder, *NARROW, "--yes")
    assert (victim / "kept").read_bytes() == DECOY


def test_gc_names_every_path_that_would_go(run_copy, capsys):
    assert main(["gc", str(run_copy.folder), *NARROW]) == 0
    listed = {run_copy.folder / line for line in capsys.readouterr().out.splitlines() if "/" in line}
    before = set(run_copy.folder.rglob("*"))
    assert main(["gc", str(run_copy.folder), *NARROW, "--yes"]) == 0
    gone = before - set(run_copy.folder.rglob("*"))
    assert run_copy.folder / "checkpoints/00002" in listed
    assert listed == {path for path in gone if not listed & set(path.parents)}


def test_a_folder_in_the_place_of_a_damaged_artifact_stops_a_redo_with_the_way_on(run_copy, tmp_path):
    run_copy.cut_after(4, "rollout")
    rollouts = run_copy.file(4, "rollouts")
    whole = rollouts.read_bytes()
    rollouts.unlink()
    rollouts.mkdir()
    (rollouts / "mine").write_bytes(DECOY)
    with pytest.raises(StoredFileError, match=f"{rollouts}: a folder lies in its place; move that elsewhere"):
        run_copy.resume()
    assert (rollouts.rename(tmp_path / "moved") / "mine").read_bytes() == DECOY
    run_copy.resume()
    assert rollouts.read_bytes() == whole


# --- hangs ---


def fifo(name: str) -> Callable[[Path], str]:
    def put(folder: Path) -> str:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        return name

    return put


def artifact(folder: Path) -> str:
    """The rollouts of the last step."""
    entries = [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]
    last = next(entry for entry in reversed(entries) if entry.get("task") == "rollout")
    return fifo(last["outputs"]["rollouts"]["uri"])(folder)


def device(name: str) -> Callable[[Path], str]:
    """A link to a device that never ends."""

    def put(folder: Path) -> str:
        place(folder / name, os.symlink, Path("/dev/zero"))
        return name

    return put


QUICK = ("verify", "report", "gc", "compare")
WAITING = [
    ("run.json", fifo("run.json"), QUICK),
    ("run.json as a device", device("run.json"), ("verify",)),
    ("ledger", fifo(LEDGER), ("verify", "gc")),
    ("lock", fifo("lock"), ("gc",)),
    ("tracking", fifo(RECORD), ("gc",)),
    ("manifest", fifo("manifests/00004.json"), ("verify",)),
    ("signature", fifo("manifests/00004.signature.json"), ("verify",)),
    ("artifact", artifact, ("verify", "bisect")),
    ("checkpoint", fifo("checkpoints/00004/masters.safetensors"), ("verify", "bisect")),
    ("policy", fifo("checkpoints/00004/policy/config.json"), ("export", "gc")),
    ("policy as a device", device("checkpoints/00004/policy/model.safetensors"), ("bisect",)),
]


@pytest.mark.parametrize(("put", "verb"), [(put, verb) for _, put, verbs in WAITING for verb in verbs])
def test_nothing_waits_for_a_file_that_never_ends(put, verb, run_copy, whole_run, tmp_path, capsys):
    folder = run_copy.folder
    named = Path(put(folder)).name
    words = {
        "report": ["--out", tmp_path / "page.html"],
        "gc": ["--set", "artifacts.keep={last: 1, best: {metric: reward/mean, mode: max}}"],
        "compare": [whole_run.folder],
        "export": [tmp_path / "policy", "--step", 4],
        "bisect": ["--prompts", 1],
    }.get(verb, [])
    assert main([verb, str(folder), *map(str, words)]) in (1, 2)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert named in said.out + said.err
