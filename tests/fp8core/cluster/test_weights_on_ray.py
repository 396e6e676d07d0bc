"""What ranks start from: no weights of a whole model in Ray's object store."""

import importlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from ray._private.serialization import SerializationContext

from fp8core.cluster.workers import ReplicaError
from fp8core.config.load import load_config
from fp8core.models.checkpoint import save_checkpoint
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.run.build import build_base, open_cluster

WIDER = {"architecture.hidden_size": 256, "architecture.intermediate_size": 1024}


@pytest.fixture
def handed(monkeypatch) -> list[int]:
    """Bytes of each value that this process hands to members, and that it gets from them; they hand each other none."""
    sizes: list[int] = []
    serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects

    def sent(context: Any, value: Any) -> Any:
        made = serialize(context, value)
        sizes.append(made.total_bytes)
        return made

    def received(context: Any, values: Any, *others: Any) -> Any:
        sizes.extend(len(value.data) for value in values if value.data is not None)
        return deserialize(context, values, *others)

    monkeypatch.setattr(SerializationContext, "serialize", sent)
    monkeypatch.setattr(SerializationContext, "deserialize_objects", received)
    return sizes


def bytes_of_the_policy(settings: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in build_base(load_config("tiny", settings)).tensors.values())


def steps_of_a_teacher_and_a_reference(folder: Path) -> dict[str, Any]:
    base = build_base(load_config("tiny", {**WIDER, "seed": 5}))
    save_checkpoint(folder, base.arch, base.tensors, base.tokenizer, dtype=torch.float32)
    steps = [
        {"name": "teacher", "uses": "tasks.teacher:teacher", "needs": ["rollouts"]},
        {"name": "reference", "uses": "tasks.reference:reference", "needs": ["rollouts", "scales"]},
    ]
    return {
        "loss.distillation": {"teacher": str(folder), "weight": 1.0},
        "loss.reference_kl": 0.1,
        "loss.reference.every": 1,
        "pipeline": {
            "insert": [{"after": "rollout", "step": step} for step in steps],
            "rewire": {"train": {"teacher": "teacher", "reference": "reference"}},
        },
    }


def test_a_run_from_scratch_with_a_teacher_on_two_ranks_makes_the_records_of_one_process(
    two_nodes, loop_run, tmp_path, handed
):
    settings = {
        **{**WIDER, "warm_start": None, "steps": 2, "rollout.prompts_per_step": 2, "checkpoint.every": 1},
        **{"training.minibatches": 2, "training.epochs": 2},
        **steps_of_a_teacher_and_a_reference(tmp_path / "teacher"),
    }
    alone = loop_run("alone", **settings)
    handed.clear()
    ranked = loop_run("ranked", **settings, cluster={"address": two_nodes.address, "ranks": 2})
    assert ranked.records == alone.records
    ranked.cut_after(2, "rollout")
    ranked.resume()
    assert ranked.records == alone.records, "the reference that ranks have stored was mixed"
    assert 0 < sum(handed) < bytes_of_the_policy(WIDER) / 4


@pytest.mark.slow
def test_ranks_that_hold_other_weights_are_refused(two_nodes, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    bf16 = {"linear": "bf16", "kv_cache": "bf16"}
    settings = {"cluster": {"address": two_nodes.address, "ranks": 2}, "precision": {"rollout": bf16, "training": bf16}}
    config, life = load_config("tiny", settings), importlib.import_module("ray_life")
    base = build_base(config)
    with closing(open_cluster(config)) as cluster:
        trainer = cluster.build_trainer(config, base.arch, base.tensors)
        assert trainer.digest() == trainer.start_digest
        cluster.workers.gather(
            [cluster.workers.ranks[1].send("build", "changed", life.change_a_weight, (trainer._key,))]
        )
        with pytest.raises(ReplicaError, match=r"^rank 1 and rank 0 hold other exported weights: \w+ and \w+$"):
            trainer.export()
        with pytest.raises(ReplicaError, match=r"^rank 1 and rank 0 hold other weights after update 1: "):
            trainer.step(two_tokens(), 1.0, ())


def two_tokens() -> RolloutBatch:
    mask, old = torch.ones(2, 1, dtype=torch.bool), torch.full((2, 1), -2.0)
    sequences = TokenBatch.of([[3, 4], [5]], [[6], [7]])
    return RolloutBatch(sequences, mask, old, old, None, torch.tensor([1.0, -1.0]), mask[:, 0])
