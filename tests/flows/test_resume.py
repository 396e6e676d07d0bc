"""A run that is cut between any two entries of its ledger, and continued, equals one that was not cut."""

import json
import shutil

import pytest

from flows.tracking.store import default_tracking_uri
from fp8core.store.artifacts import ArtifactStore

STEPS = 3
BOUNDARIES = ["none", "prompts", "rollout", "reward", "logprobs", "train", "calibrate", "sync", "evaluate", "record"]


@pytest.fixture(scope="module")
def whole(launch, runs):
    # Named, so that the copies below log to the same store.
    return launch("whole", steps=STEPS, overrides={"tracking.uri": default_tracking_uri(runs)})


@pytest.fixture
def continue_copy(whole, launch, tmp_path):
    """Continue a copy of the run that `change` has damaged."""

    def run(change):
        shutil.copytree(whole.folder, tmp_path / "whole")
        change(tmp_path / "whole")
        overrides = {"runs": str(tmp_path), "tracking.uri": default_tracking_uri(whole.runs)}
        return launch("whole", steps=STEPS, overrides=overrides)

    return run


def records(finished):
    store, steps = ArtifactStore(finished.folder), finished.ledger.steps()
    return [store.get_json(steps[index].manifest)["record"] for index in sorted(steps)]


def cut_after(folder, step, task):
    """Drop every ledger line after a task's (or, for none, after the previous step), as a kill would."""
    path = folder / "ledger.jsonl"
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        entry = json.loads(line)
        if entry.get("step") == step and task == "none":
            break
        kept.append(line)
        if entry.get("step") == step and entry.get("task") == task:
            break
    path.write_text("".join(kept))


# The flow with Prefect around it; tests/durability cuts the loop alone, at every boundary.
@pytest.mark.parametrize(
    "task", [task if task in ("none", "train") else pytest.param(task, marks=pytest.mark.slow) for task in BOUNDARIES]
)
def test_cut_after_each_task(whole, continue_copy, task):
    continued = continue_copy(lambda folder: cut_after(folder, STEPS, task))
    assert continued.state.is_completed(), continued.state.message
    assert continued.summary["weights_digest"] == whole.summary["weights_digest"]
    assert records(continued) == records(whole)


def test_a_redo_that_gives_other_weights_is_an_error(continue_copy):
    def swap_the_policy(folder):
        ledger = folder / "ledger.jsonl"
        lines = ledger.read_text().splitlines(keepends=True)
        trained = [i for i, line in enumerate(lines) if '"task":"train"' in line]
        earlier, entry = json.loads(lines[trained[0]]), json.loads(lines[trained[-1]])
        entry["outputs"]["next_policy"] = earlier["outputs"]["next_policy"]
        ledger.write_text("".join([*lines[: trained[-1]], json.dumps(entry) + "\n"]))

    refused = continue_copy(swap_the_policy)
    assert refused.state.is_failed()
    assert "task train: redoing it gave next_policy" in refused.state.message
