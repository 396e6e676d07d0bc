"""One GRPO update from stored rollouts and rewards, with stored log-probs or those of its own forward."""

from dataclasses import asdict, dataclass, replace

import pyarrow as pa
import torch

from fp8core.alignment.bounds import ratio_holds_age
from fp8core.config.steps import NoOptions
from fp8core.rl.batch import RolloutBatch, padded
from fp8core.rl.objective import row_advantages
from fp8core.run.context import RunContext
from fp8core.run.scoring import compared_rows, read_scales, stored_scores, trainer_of_policy
from fp8core.run.update_inputs import UPDATE_COLUMNS, observed_tokens, rollout_batch
from fp8core.store.artifacts import Ref
from fp8core.store.tables import ADVANTAGES, COMPLETION_KEY, keys_of
from fp8core.training.trainer import ScoringTrainer, TrainReport
from tasks.step import step


@step(
    inputs={
        "rollouts": "rollouts",
        "rewards": "rewards",
        "logprobs": "logprobs",
        "policy": "policy",
        "scales": "scales",
    },
    optional_inputs={"reference": "logprobs", "teacher": "logprobs", "turns": "turns"},
    outputs={"next_policy": "policy", "train_report": "train_report", "advantages": "advantages"},
    redo=True,
)
def train(
    run: RunContext,
    index: int,
    options: NoOptions,
    rollouts: Ref,
    rewards: Ref,
    logprobs: Ref,
    policy: Ref,
    scales: Ref,
    reference: Ref | None = None,
    teacher: Ref | None = None,
    turns: Ref | None = None,
) -> dict[str, Ref]:
    """Policy v_i becomes v_{i+1}."""
    store, trainer = run.directory.store, trainer_of_policy(run, policy)
    table, signals = store.get_table(rollouts, UPDATE_COLUMNS), LearningSignals(rewards, reference, teacher, turns)
    batch = update_batch(run, index, table, store.get_table(logprobs), signals)
    report = trainer.step(batch, run.config.rollout.temperature, read_scales(run, scales).layers)
    return stored_update(run, report, batch, table)


@step(
    inputs={"rollouts": "rollouts", "rewards": "rewards", "policy": "policy", "scales": "scales"},
    optional_inputs={"reference": "logprobs", "teacher": "logprobs", "turns": "turns"},
    outputs={
        "next_policy": "policy",
        "train_report": "train_report",
        "advantages": "advantages",
        "logprobs": "logprobs",
        "kv_statistics": "kv_statistics",
    },
    redo=True,
)
def train_scoring(
    run: RunContext,
    index: int,
    options: NoOptions,
    rollouts: Ref,
    rewards: Ref,
    policy: Ref,
    scales: Ref,
    reference: Ref | None = None,
    teacher: Ref | None = None,
    turns: Ref | None = None,
) -> dict[str, Ref]:
    """Policy v_i becomes v_{i+1}, and the forwards of its updates score the rollouts.

    Old log-probs are those of the one forward, or the rollout's own (`logprobs.source`). An audited one that differs
    fails the step before the first update. Rows that a filter dropped have scores too. Entropies, and log-probs of
    tokens that an environment or an older policy wrote, are under the policy that the update of their row begins
    with."""
    store, trainer, config = run.directory.store, trainer_of_policy(run, policy), run.config
    assert isinstance(trainer, ScoringTrainer), "the configuration was checked"
    version = trainer.version
    versions = ["versions"] if ratio_holds_age(config) else []
    table = store.get_table(rollouts, [*UPDATE_COLUMNS, *versions])
    signals = LearningSignals(rewards, reference, teacher, turns)
    batch = update_batch(run, index, table, None, signals)
    sampled = config.logprobs.source == "rollout"
    if sampled:
        keys, compared = enumerate(keys_of(table)), compared_rows(config, index, batch.mask).tolist()
        audited = {row: f"group {group}, sample {sample}" for row, (group, sample) in keys if compared[row]}
        batch = replace(batch, audited=audited)
        if versions and (older := padded(table["versions"], torch.int64, version) < version).any():
            batch = replace(batch, stale=older)
    report, scored = trainer.scored_step(batch, config.rollout.temperature, read_scales(run, scales).layers)
    if sampled:
        scored = replace(scored, logprobs=torch.where(batch.of_this_policy, batch.rollout_logprobs, scored.logprobs))
    learnt = batch if batch.old_logprobs is not None else replace(batch, old_logprobs=scored.logprobs)
    return stored_update(run, report, learnt, table) | stored_scores(run, version, table, scored)


@dataclass(frozen=True)
class LearningSignals:
    """Artifacts that say in which direction rollouts move the policy; `reference` and `teacher` are log-probs."""

    rewards: Ref
    reference: Ref | None
    teacher: Ref | None
    turns: Ref | None


def update_batch(
    run: RunContext, index: int, rollouts: pa.Table, logprobs: pa.Table | None, signals: LearningSignals
) -> RolloutBatch:
    store = run.directory.store
    penalty = store.get_table(signals.reference) if signals.reference else None
    played = store.get_table(signals.turns) if signals.turns else None
    batch = rollout_batch(rollouts, store.get_table(signals.rewards), logprobs, penalty, run.config)
    if played is not None:
        batch = replace(batch, observed=observed_tokens(rollouts, played, batch.mask.shape[1]))
    taught = padded(store.get_table(signals.teacher)["logprobs"], torch.float32, 0.0) if signals.teacher else None
    return replace(batch, teacher_logprobs=taught)


def stored_update(run: RunContext, report: TrainReport, batch: RolloutBatch, rollouts: pa.Table) -> dict[str, Ref]:
    """The next policy, the report of its update and the advantages that it used, as artifacts."""
    store = run.directory.store
    values = pa.array(row_advantages(batch, run.config.loss, run.config.correction).numpy())
    columns = [*(rollouts[name] for name in COMPLETION_KEY), values]
    return {
        "next_policy": store.put_json("policy", {"version": report.version, "weights_digest": report.digest}),
        "train_report": store.put_json("train_report", asdict(report)),
        "advantages": store.put_table("advantages", pa.table(columns, schema=ADVANTAGES)),
    }
