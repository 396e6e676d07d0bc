"""Runs of a few steps, to be read by many tests and changed in copies."""

import shutil

import pytest

from fp8core.run.execute import StepError, carried, run_step


@pytest.fixture
def copy_of(tmp_path):
    """A copy of a run that a test may cut and continue."""

    def copy(run):
        shutil.copytree(run.folder.parent, tmp_path / "loop")
        return type(run)(tmp_path / "loop" / run.folder.name)

    return copy


@pytest.fixture
def halted_ahead():
    """Generation beside the update of a step in a live run, where another task has failed: halted_ahead(live, step).

    Or another task of the step: halted_ahead(live, step, name).
    """

    def fails(live, index, name="ahead"):
        live.halted.set()
        planned = next(each for each in live.graph.steps if each.name == name)
        artifacts = carried(live, index) | live.directory.ledger.artifacts(index)
        ports = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
        with pytest.raises(StepError, match="another task of the step has failed") as failed:
            run_step(live, index, planned, ports)
        return failed.value

    return fails
