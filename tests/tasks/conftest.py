"""Runs of a few steps, to be read by many tests and changed in copies."""

import shutil

import pytest


@pytest.fixture
def copy_of(tmp_path):
    """A copy of a run that a test may cut and continue."""

    def copy(run):
        shutil.copytree(run.folder.parent, tmp_path / "loop")
        return type(run)(tmp_path / "loop" / run.folder.name)

    return copy
