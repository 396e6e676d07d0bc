from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from fp8core.store.artifacts import Ref, RolloutShards
from fp8core.store.ledger import CheckpointEntry, StepEntry
from fp8core.store.run_directory import RunDirectory


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
