"""A ledger whose lines are well-formed, but name other tasks or artifacts than the manifests: one line says where."""

import io

import pytest

from fp8core.errors import StoredFileError
from fp8core.report.console import Console
from fp8core.run.export import stored_policy
from fp8core.run.snapshot import RunSnapshot

EDITS = {
    "an output of the last step": (4, "calibrate", "next_scales"),
    "metrics of the last step": (4, "record", "metrics"),
    "an output of step 0": (0, "calibrate", "scales"),
}


def rename_output(run, step, task, artifact):
    def renamed(entry):
        if entry.get("step") == step and entry.get("task") == task:
            entry["outputs"]["renamed"] = entry["outputs"].pop(artifact)

    run.rewrite(renamed)


@pytest.mark.parametrize("edit", EDITS)
def test_a_resume_refuses_a_renamed_output(run_copy, edit):
    step, task, artifact = EDITS[edit]
    rename_output(run_copy, step, task, artifact)
    with pytest.raises(StoredFileError, match=rf"^ledger\.jsonl: step {step}: differs from its manifest: task {task} "):
        run_copy.resume(steps=5)


def test_a_resume_refuses_a_renamed_task_of_step_0(run_copy):
    def renamed(entry):
        if entry.get("step") == 0 and entry.get("task") == "warm_start":
            entry["task"] = "renamed"

    run_copy.rewrite(renamed)
    with pytest.raises(StoredFileError, match=r"^ledger\.jsonl: step 0: differs from its manifest: task renamed "):
        run_copy.resume(steps=5)


def test_replay_and_export_refuse_a_renamed_output_of_their_step(run_copy):
    rename_output(run_copy, 3, "train", "next_policy")
    said = (
        r"^ledger\.jsonl: step 3: differs from its manifest: task train stored advantages, renamed, train_report, by "
        r"the manifest advantages, next_policy, train_report$"
    )
    with pytest.raises(StoredFileError, match=said):
        run_copy.replayed([3])
    original, console = RunSnapshot.read(run_copy.folder), Console(io.StringIO(), 4)
    with pytest.raises(StoredFileError, match=said), stored_policy(original, 3, console):
        pass


def test_a_step_that_is_not_read_may_differ(run_copy):
    """`verify` finds it; a resume begins with the newest checkpoint."""
    rename_output(run_copy, 1, "sync", "sync_report")
    run_copy.resume(steps=5)
    assert len(run_copy.records) == 6
