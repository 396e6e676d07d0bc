"""`fp8-grpo gc` on a real run, which goes on afterwards."""

import re
import shutil

import pytest

from flows.cli import main
from flows.tracking.store import default_tracking_uri
from fp8core.store.artifacts import ArtifactStore

KEEP = {"checkpoint.every": 1, "checkpoint.keep": 1, "artifacts.keep": {"last": 1, "every": 2}}
NARROW = ["--set", "artifacts.keep={last: 1, every: null}"]


@pytest.fixture(scope="module")
def run(launch, runs):
    """Five steps, with a checkpoint after each."""
    # The store is named, so that copies log to it too.
    finished = launch("collected", steps=5, overrides={**KEEP, "tracking.uri": default_tracking_uri(runs)})
    assert finished.state.is_completed(), finished.state.message
    return finished


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run.folder, tmp_path / "collected")


def files(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def total(paths):
    return sum(path.stat().st_size for path in paths)


def test_without_yes_it_lists_and_removes_nothing(copy, capsys):
    before = files(copy)
    assert main(["gc", str(copy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ['artifacts.keep: {"last":1,"every":2}', "steps kept:     0, 2, 4-5", "steps dropped:  1, 3"]
    kinds = {line.split()[2] for line in lines if line.startswith("bytes of ")}
    assert "rollouts:" in kinds
    assert not {"metrics:", "policy:", "manifest:", "checkpoint:"} & kinds
    assert re.fullmatch(r"nothing was removed yet: --yes removes \d+ files, [\d,]+ bytes", lines[-1])
    assert files(copy) == before


def test_a_run_goes_on_from_what_was_kept(run, copy, launch, capsys):
    """Its last checkpoint is gone, so that it also redoes a step."""
    shutil.rmtree(copy / "checkpoints" / "00005")
    size = total(files(copy / "artifacts"))
    assert main(["gc", str(copy), "--yes", *NARROW]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1:3] == ["steps kept:     0, 4-5", "steps dropped:  1-3"]
    assert re.fullmatch(r"removed \d+ files, [\d,]+ bytes", out[-1])
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["00004"]
    assert total(files(copy / "artifacts")) < size
    elsewhere = {"runs": str(copy.parent), "tracking.uri": default_tracking_uri(run.runs)}
    continued = launch("collected", steps=6, overrides={**KEEP, **elsewhere})
    assert continued.state.is_completed(), continued.state.message
    store, ledger = ArtifactStore(copy), continued.ledger
    assert sorted(ledger.steps()) == list(range(7))
    assert all(store.get_json(entry.manifest) for entry in ledger.steps().values())
    assert main(["gc", str(copy), *NARROW]) == 0
    assert "steps kept:     0, 6" in capsys.readouterr().out
