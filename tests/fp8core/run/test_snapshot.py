"""A run is read from its folder alone, and a scratch folder lies where all processes of the run see it."""

import pytest

from fp8core.errors import UserError
from fp8core.run.snapshot import RunSnapshot, scratch_folder


def test_ranks_of_other_nodes_see_a_scratch_folder_beside_the_run(run_copy, tmp_path):
    one = RunSnapshot.read(run_copy.folder).config(1)
    settings = one.cluster.model_copy(update={"address": "auto"})
    several = one.model_copy(update={"cluster": settings})
    with scratch_folder(run_copy.folder, 1, one) as folder:
        assert not folder.is_relative_to(run_copy.folder.parent)
    before = set(run_copy.folder.parent.iterdir())
    with scratch_folder(run_copy.folder, 1, one, several) as folder:
        assert folder.parent.parent == run_copy.folder.parent
        assert folder.parent.name.startswith("."), "no name of a run"
    assert set(run_copy.folder.parent.iterdir()) == before
    refused = pytest.raises(UserError, match=rf"^{tmp_path}/missing: cannot be written: No such file")
    with refused, scratch_folder(tmp_path / "missing" / "run", 0, several):
        pass
