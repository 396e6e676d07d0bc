from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pyarrow as pa

from fp8core.store.artifacts import Ref, RolloutShards
from fp8core.store.ledger import CheckpointEntry, SegmentEntry, StepEntry, TaskEntry
from fp8core.store.run_directory import RunDirectory

SEGMENT = SegmentEntry(pid=1, host="h", code_version="c", started=1.0)
TASK = TaskEntry(step=0, task="warm_start", key="k", outputs={}, started=1.0, seconds=1.0)


def test_a_run_is_created_and_opened_again(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "first"
    with RunDirectory.create_or_open(root) as run:
        assert run.path == root
        assert run.description() is None
        written = run.write_description({"seed": 1, "data": {"source": "chain"}}, "code")
        ref = run.store.put_json("notes", {"version": 0})
        run.ledger.append(SEGMENT)
        run.write_text("manifests/00000.json", "{}")
    assert sorted(path.name for path in root.iterdir()) == [
        "artifacts",
        "checkpoints",
        "ledger.jsonl",
        "lock",
        "manifests",
        "run.json",
        "shards",
    ]
    with RunDirectory.create_or_open(root) as run:
        assert run.description() == written
        assert written.config == {"seed": 1, "data": {"source": "chain"}}
        assert written.code_version == "code"
        assert datetime.fromisoformat(written.created).tzinfo is not None
        assert run.store.get_json(ref) == {"version": 0}
        assert run.ledger.segments() == [SEGMENT]
        assert (run.path / "manifests/00000.json").read_text() == "{}"


def test_a_checkpoint_that_was_killed_before_its_line_is_swept_on_opening(tmp_path: Path) -> None:
    ref = Ref(kind="manifest", digest="ab" * 32, uri=f"artifacts/ab/{'ab' * 32}.json", size=3)
    with RunDirectory.create_or_open(tmp_path) as run:
        for step in range(4):
            run.ledger.append(StepEntry(step=step, manifest=ref, weights_digest="w", committed_ms=1))
        run.ledger.append(CheckpointEntry(step=2, uri="checkpoints/00002", digest="d", weights_digest="w"))
    names = "00002", "00003", "00004", "00003 of mine"
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    RunDirectory.create_or_open(tmp_path).close()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"00002", "00003 of mine"}


def test_shards_of_committed_steps_are_swept_on_opening(
    tmp_path: Path, rollouts: Callable[[int, int], pa.Table]
) -> None:
    ref = Ref(kind="manifest", digest="ab" * 32, uri=f"artifacts/ab/{'ab' * 32}.json", size=3)
    with RunDirectory.create_or_open(tmp_path) as run:
        for step in (1, 2):
            RolloutShards(tmp_path / "shards" / f"{step:05d}").append(rollouts(step, 2))
        run.ledger.append(StepEntry(step=1, manifest=ref, weights_digest="w", committed_ms=1))
    RunDirectory.create_or_open(tmp_path).close()
    assert sorted((tmp_path / "shards").iterdir()) == [tmp_path / "shards" / "00002"]
    assert RolloutShards(tmp_path / "shards" / "00002").read() is not None
