"""`verify` beside a run that goes on, and what it says of checkpoints that a resume would look for."""

import json
import shutil
from pathlib import Path

import pytest

from fp8core.config.run import KeepConfig
from fp8core.run.verify import verify
from fp8core.store.gc import plan_removal, remove
from fp8core.store.layout import LEDGER
from fp8core.store.run_view import RunView


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "run"))


def test_what_a_live_run_has_not_committed_is_no_error(run: Path) -> None:
    lines = (run / LEDGER).read_text().splitlines(keepends=True)
    (end,) = [i for i, line in enumerate(lines) if '"event":"step","step":3' in line]
    (run / LEDGER).write_text("".join(lines[:end]) + lines[end][:40])
    shutil.rmtree(run / "checkpoints/00003")  # Which is made after the step's line.
    view = RunView.read(run)
    assert list(view.steps) == [0, 1, 2]
    assert [finding.place for finding in verify(view) if finding.severity == "error"] == []


def test_what_a_live_run_prunes_and_what_gc_removes_meanwhile_is_no_error(run: Path) -> None:
    lines = (run / LEDGER).read_text().splitlines(keepends=True)
    newest = next(i for i, line in enumerate(lines) if '"event":"checkpoint","step":3' in line)
    (run / LEDGER).write_text("".join(lines[:newest]))
    view = RunView.read(run)
    (run / LEDGER).write_text("".join(lines))
    shutil.rmtree(run / "checkpoints/00002")
    removal = plan_removal(run, KeepConfig(last=1), "2026-01-01T00:00:00+00:00", None, 0)
    assert removal.deletions
    remove(run, removal.deletions)
    assert [str(finding) for finding in verify(view) if finding.severity == "error"] == []
    shutil.rmtree(run / "checkpoints/00003")
    (problem,) = (finding.problem for finding in verify(RunView.read(run)) if finding.severity == "error")
    assert problem == "the folder is missing, and it is the newest checkpoint"


def test_checkpoints_that_older_policies_follow_from_are_missed(run: Path) -> None:
    described = json.loads((run / "run.json").read_text())
    described["config"]["pipeline"]["mode"] = "asynchronous"
    (run / "run.json").write_text(json.dumps(described))
    shutil.rmtree(run / "checkpoints/00002", ignore_errors=True)
    reach = RunView.read(run).config.pipeline.reach
    assert reach == 2
    missed = f"none up to step {3 - reach} is there: a resume makes the policies since then from the first one"
    assert f"note checkpoints: {missed}" in [str(finding) for finding in verify(RunView.read(run))]
