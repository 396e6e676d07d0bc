"""A process killed with SIGKILL while it writes: what it was told is committed, is; nothing else is half there."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from fp8core.store.artifacts import Ref, RolloutShards
from fp8core.store.ledger import TaskEntry
from fp8core.store.run_directory import RunDirectory

Acknowledge = Callable[[str], None]
Rollouts = Callable[[int, int], pa.Table]
Kill = Callable[[Callable[[Acknowledge], None], float], list[str]]


def write_for_ever(root: Path, life: int, acknowledge: Acknowledge, rollouts: Rollouts) -> None:
    """Puts and appends until killed; a word per commit, after it."""
    with RunDirectory.create_or_open(root) as run:
        shards = RolloutShards(run.path / "shards" / "00000")
        for i in range(life * 100_000, (life + 1) * 100_000):
            table = rollouts(i, 200)
            refs = {
                "rows": run.store.put_table("rows", table),
                "statistics": run.store.put_tensors("statistics", {"amax": torch.full((64,), float(i))}),
                "notes": run.store.put_json("notes", {"i": i}),
            }
            entry = TaskEntry(step=i, task="reward", key="k", outputs=refs, started=0.0, seconds=1.0)
            run.ledger.append(entry)
            acknowledge(json.dumps({"entry": entry.model_dump(mode="json")}))
            shards.append(table)
            acknowledge(json.dumps({"shard": i}))


def check(run: RunDirectory, entries: list[TaskEntry], shards: list[int]) -> None:
    for entry in entries:
        assert run.ledger.tasks(entry.step)["reward"] == entry
    table = RolloutShards(run.path / "shards" / "00000").read()
    groups = [] if table is None else table["group"].to_pylist()[::200]
    assert [i for i in groups if i in set(shards)] == shards
    # Of what was not acknowledged only the one write in flight may be there, and then it is whole.
    for step in {entry.step for entry in entries} | set(groups):
        for ref in run.ledger.tasks(step)["reward"].outputs.values():
            read(run, ref, step)


def read(run: RunDirectory, ref: Ref, i: int) -> None:
    match ref.kind:
        case "rows":
            assert run.store.get_table(ref)["group"].to_pylist() == [i] * 200
        case "statistics":
            assert run.store.get_tensors(ref)["amax"].tolist() == [float(i)] * 64
        case _:
            assert run.store.get_json(ref) == {"i": i}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_every_acknowledged_write_survives_kills(
    tmp_path: Path, seed: int, acknowledged_before_kill: Kill, rollouts: Rollouts
) -> None:
    instants = random.Random(seed)
    entries: list[TaskEntry] = []
    shards: list[int] = []
    for life in range(3):

        def work(acknowledge: Acknowledge, life: int = life) -> None:
            write_for_ever(tmp_path, life, acknowledge, rollouts)

        words = [json.loads(line) for line in acknowledged_before_kill(work, instants.uniform(0.0, 0.1))]
        entries += [TaskEntry.model_validate(word["entry"]) for word in words if "entry" in word]
        shards += [word["shard"] for word in words if "shard" in word]
        with RunDirectory.create_or_open(tmp_path) as run:
            check(run, entries, shards)
            assert [path for path in tmp_path.rglob(".*.tmp")] == []
    assert len(entries) >= 3
