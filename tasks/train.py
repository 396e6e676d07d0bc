"""One GRPO update from stored rollouts and rewards, with stored log-probs or those of its own forward."""

from dataclasses import replace

import torch

from fp8core.alignment.bounds import ratio_holds_age
from fp8core.config.steps import NoOptions
from fp8core.rl.batch import pad_column
from fp8core.run import batches
from fp8core.run.context import StepContext
from fp8core.run.reference import next_reference
from fp8core.store.artifacts import Ref
from fp8core.store.tables import keys_of
from fp8core.training.trainer import ScoringTrainer
from tasks.step import step


@step(
    inputs={"rollouts": "rollouts", "rewards": "rewards", "policy": "policy", "scales": "scales"},
    inputs_where={
        "scoring_pass": {"logprobs": "logprobs"},
        "mixed_reference": {"reference_policy": "reference_policy"},
    },
    optional_inputs={"reference": "logprobs", "teacher": "logprobs", "turns": "turns"},
    outputs={"next_policy": "policy", "train_report": "train_report", "advantages": "advantages"},
    outputs_where={
        "scoring_update": {"logprobs": "logprobs", "kv_statistics": "kv_statistics"},
        "mixed_reference": {"next_reference_policy": "reference_policy"},
    },
    carries={"reference_policy": "next_reference_policy"},
    redo=True,
)
def train(
    run: StepContext,
    index: int,
    options: NoOptions,
    rollouts: Ref,
    rewards: Ref,
    policy: Ref,
    scales: Ref,
    logprobs: Ref | None = None,
    reference_policy: Ref | None = None,
    **signals: Ref,
) -> dict[str, Ref]:
    """Without `logprobs` the forwards of the updates score the rollouts.

    Old log-probs are then those of the one forward, or the rollout's own (`logprobs.source`). An audited one that
    differs fails the step before the first update. Rows that a filter dropped have scores too."""
    store = run.store
    trainer = batches.trainer_of_policy(run, policy)
    config = run.config
    version = trainer.version
    temperature = config.rollout.temperature
    layers = batches.read_scales(run, scales).layers
    versions = ["versions"] if logprobs is None and ratio_holds_age(config) else []
    table = store.get_table(rollouts, [*batches.UPDATE_COLUMNS, *versions])
    tables = {name: store.get_table(ref) for name, ref in signals.items()}
    old = None if logprobs is None else store.get_table(logprobs)
    batch = batches.rollout_batch(table, store.get_table(rewards), old, tables, config)
    if logprobs is not None:
        outputs = batches.stored_update(run, trainer.step(batch, temperature, layers), batch, table)
    else:
        assert isinstance(trainer, ScoringTrainer), "the configuration was checked"
        takes_rollout = config.logprobs.source == "rollout"
        if takes_rollout:
            keys = enumerate(keys_of(table))
            compared_mask = batches.compared_rows(config, index, batch.policy_mask).tolist()
            labels = {row: f"group {group}, sample {sample}" for row, (group, sample) in keys if compared_mask[row]}
            batch = replace(batch, audited=labels)
            if versions and (older := pad_column(table["versions"], torch.int64, version) < version).any():
                batch = replace(batch, stale_mask=older)
        report, score = trainer.scored_step(batch, temperature, layers)
        if takes_rollout:
            score = replace(score, logprobs=torch.where(batch.fresh_mask, batch.rollout_logprobs, score.logprobs))
        scored_batch = batch if batch.old_logprobs is not None else replace(batch, old_logprobs=score.logprobs)
        outputs = batches.stored_update(run, report, scored_batch, table) | batches.stored_scores(
            run, version, table, score
        )
    if reference_policy is not None:
        outputs["next_reference_policy"] = next_reference(run, index, reference_policy)
    return outputs
