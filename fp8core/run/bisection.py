"""The subject of a bisection (`alignment.bisect`): the policy of a run, with tokens to score."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8core.alignment.bisect import Bisection, Granularity, Side, Task, bisect, units_of
from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.config.run import RunConfig, without_adapters
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import find_checkpoint
from fp8core.models.weights import Formats, reference_formats, rollout_formats
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rl.batch import TokenBatch
from fp8core.run.build import build_local_trainer
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER, POLICY
from fp8core.store.ledger import LedgerView
from fp8core.training.registry import trainer_of

Against = Literal["bf16", "fp8_block", "fp32"]
_SIDES = {"bf16": SidePrecision(linear="bf16", kv_cache="bf16"), "fp8_block": SidePrecision()}


@dataclass(frozen=True)
class Subject:
    config: RunConfig
    arch: Architecture
    masters: Mapping[str, Tensor]
    task: Task

    def passes(self, by: Granularity) -> int:
        return 2 * len(units_of(self.arch, by)) + 2

    def bisected(self, against: Against, by: Granularity) -> Bisection:
        contract, layers = self.config.precision, self.arch.num_layers
        return bisect(
            self.arch,
            reference=Side.of(_reference_side(against, contract, layers), self.masters),
            suspect=Side.of(rollout_formats(contract, layers), self.masters),
            task=self.task,
            units=units_of(self.arch, by),
        )


def _reference_side(against: Against, contract: PrecisionContract, num_layers: int) -> Formats:
    if against == "fp32":
        return reference_formats(num_layers)
    return rollout_formats(
        PrecisionContract(rollout=_SIDES[against], scale_rule=contract.scale_rule, attention=contract.attention),
        num_layers,
    )


def run_subject(config: RunConfig, folder: Path, prompts: int) -> Subject:
    """The policy of a run's last checkpoint on the first `prompts` of its step, with the scales of the next step.

    Raises UserError: the run has no checkpoint; StoredFileError: the checkpoint or an artifact is damaged."""
    ledger, store = LedgerView.read(folder / LEDGER), ArtifactStore(folder)
    kept = [entry for entry in ledger.checkpoints() if (folder / entry.uri).is_dir()]
    if not kept:
        raise UserError(f"{folder}: the run has no checkpoint yet (checkpoint.every={config.checkpoint.every})")
    last = max(kept, key=lambda entry: entry.step)
    policy = find_checkpoint(folder / last.uri / POLICY)
    refs = [ref for task in ledger.tasks(last.step).values() for ref in task.outputs.values()]
    rollouts = store.get_table(next(ref for ref in refs if ref.kind == "rollouts")).to_pylist()
    found = [store.get_json(ref) for ref in refs if ref.kind == "scales"]
    sequences = sequences_of([row for row in rollouts if row["group"] < prompts])
    with closing(build_local_trainer(_alone(config), policy.architecture, dict(policy.source()))) as trainer:
        # Adapters are merged in the policy already; other masters are wider than it.
        if config.training.lora is None:
            trainer.load(folder / last.uri)
        scales = next(content["layers"] for content in found if content["version"] == last.step)
        task = Task(sequences, config.rollout.temperature, [LayerScales(**layer) for layer in scales])
        return Subject(config, trainer.arch, trainer.masters, task)


def sequences_of(rollouts: Sequence[Mapping[str, Any]]) -> TokenBatch:
    batch = TokenBatch.of([row["prompt_tokens"] for row in rollouts], [row["tokens"] for row in rollouts])
    written = torch.tensor([flag for row in rollouts for flag in row["written"]])
    return replace(batch, completion=batch.completion.masked_scatter(batch.completion, written))


def _alone(config: RunConfig) -> RunConfig:
    """The configuration for a whole policy in this process, whatever grid shared it."""
    training = without_adapters(config).training
    return config.model_copy(update={"training": trainer_of(training).alone(training)})
