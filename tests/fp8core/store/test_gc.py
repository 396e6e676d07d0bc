"""What may go from a run, on folders of small made-up files with real ledgers and manifests."""

import shutil
from pathlib import Path

import pytest
from step_records import step_manifest, step_record

from fp8core.config.run import KeepConfig
from fp8core.durable import folder_digest
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref, contents
from fp8core.store.gc import Removal, RemovedFile, kept_steps, plan_removal, remove
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import CheckpointEntry, LedgerView, StepEntry, TaskEntry
from fp8core.store.manifest import StepManifest
from fp8core.store.run_directory import RunDirectory

STEPS, EVERY = 12, 4
LAST = KeepConfig(last=1)


def manifest(step: int, inputs: dict[str, Ref], outputs: dict[str, Ref]) -> StepManifest:
    return step_manifest(step_record(step, inputs={"train": contents(inputs)}, outputs={"train": contents(outputs)}))


def outputs_of(store: ArtifactStore, step: int) -> dict[str, Ref]:
    """What one step stores; rewards are the same in every third step, so that steps share a file."""
    return {
        "rollouts": store.put_json("texts", {"step": step, "text": "x" * 500}),
        "rewards": store.put_json("marks", {"right": step % 3}),
        "next_policy": store.put_json("policy", {"version": step, "weights_digest": f"w{step}"}),
        "next_scales": store.put_json("scales", {"version": step}),
        "metrics": store.put_json("metrics", {"accuracy": (step * 5 % 12) / 12, "step": step} if step % 2 else {}),
    }


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps, checkpoints after 4, 8 and 12, and the first task of step 13."""
    with RunDirectory.create_or_open(tmp_path_factory.mktemp("retention") / "run") as run:
        carried: dict[str, Ref] = {}
        for step in range(STEPS + 1):
            outputs = outputs_of(run.store, step)
            run.ledger.append(TaskEntry(step=step, task="train", key="", outputs=outputs, started=0.0, seconds=0.0))
            stored = run.store.put_json("manifest", manifest(step, carried, outputs).model_dump(mode="json"))
            run.ledger.append(StepEntry(step=step, manifest=stored, weights_digest=f"w{step}", committed_ms=step))
            carried = {"policy": outputs["next_policy"], "scales": outputs["next_scales"]}
            if step and step % EVERY == 0:
                checkpoint(run, step)
        begun = {"prompts": run.store.put_json("questions", {"step": STEPS + 1})}
        run.ledger.append(TaskEntry(step=STEPS + 1, task="p", key="", outputs=begun, started=0.0, seconds=0.0))
        return run.path


def checkpoint(run: RunDirectory, step: int) -> None:
    uri = f"checkpoints/{step:05d}"
    run.write_text(f"{uri}/policy/weights", f"weights {step}")
    digest = folder_digest(run.path / uri)
    run.ledger.append(CheckpointEntry(step=step, uri=uri, digest=digest, weights_digest=f"w{step}"))


def readable(folder: Path, step: int) -> set[str]:
    """The artifacts of a step that can be read."""
    store, found = ArtifactStore(folder), set()
    for name, ref in LedgerView.read(folder / LEDGER).artifacts(step).items():
        try:
            store.get_json(ref)
            found.add(name)
        except ArtifactError:
            continue
    return found


def gc(folder: Path, keep: KeepConfig | None) -> Removal:
    removal = plan_removal(folder, keep)
    remove(folder, removal)
    return removal


ALL = {"rollouts", "rewards", "next_policy", "next_scales", "metrics"}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (KeepConfig(last=3), {0, 18, 19, 20}),
        (KeepConfig(last=99), set(range(21))),
        (KeepConfig(last=2, every=10), {0, 10, 19, 20}),
    ],
)
def test_a_step_that_any_rule_names_is_kept(keep: KeepConfig, expected: set[int]) -> None:
    assert kept_steps(keep, range(21)) == expected


def test_of_a_step_that_is_not_kept_its_metrics_policy_and_manifest_stay(folder: Path) -> None:
    removal = gc(folder, KeepConfig(last=2, every=5))
    assert removal.remaining_steps == [0, 5, 10, 11, 12]
    assert removal.dropped_steps == [1, 2, 3, 4, 6, 7, 8, 9]
    store, ledger = ArtifactStore(folder), LedgerView.read(folder / LEDGER)
    for step in removal.remaining_steps:
        assert readable(folder, step) == ALL
    for step, entry in ledger.steps().items():
        read = StepManifest.model_validate_json(store.path(entry.manifest).read_bytes()).record
        assert read.step == step
        if step in removal.remaining_steps:
            named = [content.uri for content in ledger.artifacts(step).values()]
            assert all((folder / uri).is_file() for uri in named)
    # Scales of 4 and 9 are inputs of 5 and 10; rewards are shared with kept steps.
    for step in (4, 9):
        assert readable(folder, step) == {"next_policy", "metrics", "rewards", "next_scales"}
    for step in (1, 2, 3, 6, 7, 8):
        assert readable(folder, step) == {"next_policy", "metrics", "rewards"}
    assert ArtifactStore(folder).get_json(ledger.artifacts(13)["prompts"]) == {"step": 13}
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["00012"]


def test_every_step_from_the_last_intact_checkpoint_on_is_kept(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints" / "00012")
    (folder / "checkpoints" / "00008" / "policy" / "weights").write_text("damaged")
    removal = gc(folder, LAST)
    assert removal.remaining_steps == [0, *range(4, 13)]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["00004", "00008"]
    shutil.rmtree(folder / "checkpoints")
    assert plan_removal(folder, LAST).dropped_steps == []


@pytest.mark.parametrize(("reach", "first"), [(0, 12), (4, 8), (5, 4), (9, 1)])
def test_policies_that_the_next_step_scores_with_stay_in_reach_of_a_checkpoint(folder, reach: int, first: int) -> None:
    assert plan_removal(folder, LAST, reach=reach).remaining_steps == [0, *range(first, 13)]


def test_files_that_the_ledger_does_not_name_go_whatever_is_kept(folder: Path) -> None:
    orphan = ArtifactStore(folder).put_json("texts", {"of": "a task that was killed"})
    half_written = folder / orphan.uri.replace(orphan.digest, f".{orphan.digest}.tmp")
    half_written.touch()
    removal = gc(folder, None)
    assert removal.files == [RemovedFile(orphan.uri, "orphan", orphan.size)]
    assert removal.dropped_steps == []
    assert not (folder / orphan.uri).exists()
    assert half_written.exists()
    assert all(readable(folder, step) == ALL for step in range(13))


def test_a_kill_on_the_way_is_repaired_by_the_next_time(folder: Path) -> None:
    planned = plan_removal(folder, LAST)
    remove(folder, planned._replace(files=planned.files[:7]))
    (folder / "checkpoints" / "00004").rename(folder / "checkpoints" / ".00004.partial")
    again = gc(folder, LAST).files
    assert (again[0].uri, again[0].size > 0) == ("checkpoints/.00004.partial", True)
    assert not any((folder / each.uri).exists() for each in planned.files)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["00012"]
    assert LedgerView.read(folder / LEDGER).removed_steps() == set(planned.dropped_steps)
