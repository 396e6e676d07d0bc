"""A run that is cut between any two entries of its ledger, and continued, equals one that was not cut."""

import json
import shutil

import pytest

from fp8core.store.artifacts import ArtifactStore

STEPS = 3
BOUNDARIES = ["none", "prompts", "rollout", "reward", "logprobs", "train", "calibrate", "sync", "evaluate", "record"]


@pytest.fixture(scope="module")
def whole(launch):
    return launch("whole", steps=STEPS)


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


@pytest.mark.parametrize("task", BOUNDARIES)
def test_cut_after_each_task(whole, launch, tmp_path, task):
    shutil.copytree(whole.folder, tmp_path / "whole")
    cut_after(tmp_path / "whole", STEPS - 1, task)
    continued = launch("whole", steps=STEPS, overrides={"runs": str(tmp_path)})
    assert continued.state.is_completed(), continued.state.message
    assert continued.summary["weights_digest"] == whole.summary["weights_digest"]
    assert records(continued) == records(whole)


def test_a_redo_that_gives_other_weights_is_an_error(whole, launch, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "whole")
    ledger = tmp_path / "whole" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    position = max(i for i, line in enumerate(lines) if '"task":"train"' in line)
    entry, earlier = json.loads(lines[position]), json.loads(next(line for line in lines if '"task":"train"' in line))
    entry["outputs"]["next_policy"] = earlier["outputs"]["next_policy"]
    ledger.write_text("".join([*lines[:position], json.dumps(entry) + "\n"]))
    refused = launch("whole", steps=STEPS, overrides={"runs": str(tmp_path)})
    assert refused.state.is_failed()
    assert "task train: redoing it gave next_policy" in refused.state.message
