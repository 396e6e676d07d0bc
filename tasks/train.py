"""One GRPO update from stored rollouts and rewards, with stored log-probs or those of its own forward."""

from dataclasses import asdict, replace

import pyarrow as pa
import torch
from torch import Tensor

from fp8core.alignment.bounds import ratio_holds_age
from fp8core.config.run import RunConfig
from fp8core.config.steps import NoOptions
from fp8core.errors import UserError
from fp8core.rl.advantages import (
    ESTIMATORS,
    Scores,
    TurnReward,
    informative,
    informative_turns,
    kl_penalties,
    turn_advantages,
)
from fp8core.rl.batch import RolloutBatch, padded
from fp8core.rl.correction import correct, log_ratio, row_error_metrics, row_errors
from fp8core.rl.objective import named_correction
from fp8core.rl.user_loss import loss_source
from fp8core.run.context import RunContext
from fp8core.run.scales import read_scales
from fp8core.store.artifacts import Ref
from fp8core.training.trainer import ScoringTrainer, TrainReport
from tasks.logprobs import (
    ORDERED,
    SEQUENCE_COLUMNS,
    compared_rows,
    layer_scales,
    policy_batch,
    stored_scores,
    trainer_of_policy,
)
from tasks.reward import check_reward
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
    outputs={"next_policy": "policy", "train_report": "train_report"},
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
    table = store.get_table(rollouts, [*ORDERED, *SEQUENCE_COLUMNS, "written", "logprobs"])
    batch, masking = update_batch(run, index, table, rewards, store.get_table(logprobs), reference, teacher, turns)
    report = trainer.step(batch, run.config.rollout.temperature, layer_scales(read_scales(run, scales)))
    return stored_update(run, report, masking)


@step(
    inputs={"rollouts": "rollouts", "rewards": "rewards", "policy": "policy", "scales": "scales"},
    optional_inputs={"reference": "logprobs", "teacher": "logprobs", "turns": "turns"},
    outputs={
        "next_policy": "policy",
        "train_report": "train_report",
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

    Old log-probs are those of the one forward, or the rollout's own, of whatever version (`logprobs.source`). An
    audited one that differs fails the step before the first update. The forwards go over every row, so those that a
    filter has dropped have scores too. Entropies, and log-probs of tokens that an environment or an older policy wrote,
    are under the policy that the update of their row begins with.
    """
    store, trainer, config = run.directory.store, trainer_of_policy(run, policy), run.config
    assert isinstance(trainer, ScoringTrainer), "the configuration was checked"
    version = trainer.version
    versions = ["versions"] if ratio_holds_age(config) else []
    table = store.get_table(rollouts, [*ORDERED, *SEQUENCE_COLUMNS, "written", "logprobs", *versions])
    sampled = table if config.logprobs.source == "rollout" else None
    batch, masking = update_batch(run, index, table, rewards, sampled, reference, teacher, turns)
    if sampled is not None:
        names = enumerate(zip(*(table[name].to_pylist() for name in ORDERED), strict=True))
        compared = compared_rows(config, index, batch.mask).tolist()
        audited = {row: f"group {group}, sample {sample}" for row, (group, sample) in names if compared[row]}
        batch = replace(batch, audited=audited)
        if versions and (older := padded(table["versions"], torch.int64, version) < version).any():
            batch = replace(batch, stale=older)
    report, scored = trainer.scored_step(batch, config.rollout.temperature, layer_scales(read_scales(run, scales)))
    if sampled is not None:
        scored = replace(scored, logprobs=torch.where(batch.of_this_policy, batch.rollout_logprobs, scored.logprobs))
    return stored_update(run, report, masking) | stored_scores(run, version, table, scored)


def update_batch(
    run: RunContext,
    index: int,
    rollouts: pa.Table,
    rewards: Ref,
    logprobs: pa.Table | None,
    reference: Ref | None,
    teacher: Ref | None,
    turns: Ref | None,
) -> tuple[RolloutBatch, dict[str, float]]:
    """The batch of a step's update, as `rollout_batch`, with what the teacher and the step itself add."""
    store = run.directory.store
    penalty = store.get_table(reference) if reference else None
    played = store.get_table(turns) if turns else None
    batch, masking = rollout_batch(rollouts, store.get_table(rewards), logprobs, penalty, run.config, played)
    if played is not None:
        batch = replace(batch, observed=observed_tokens(rollouts, played, batch.mask.shape[1]))
    taught = padded(store.get_table(teacher)["logprobs"], torch.float32, 0.0) if teacher else None
    refuse_edited_loss(run)
    return replace(batch, teacher_logprobs=taught, draw=(run.config.seed, index)), masking


def stored_update(run: RunContext, report: TrainReport, masking: dict[str, float]) -> dict[str, Ref]:
    """The next policy and the report of its update, as artifacts."""
    store, report = run.directory.store, replace(report, correction=report.correction | masking)
    return {
        "next_policy": store.put_json("policy", {"version": report.version, "weights_digest": report.digest}),
        "train_report": store.put_json("train_report", asdict(report)),
    }


def refuse_edited_loss(run: RunContext) -> None:
    """The trainer holds the loss that the run began with, and the record of the step names it.

    Raises:
        UserError: the user's file has changed since.
    """
    if run.loss_source is not None and loss_source(run.config.loss.policy) != run.loss_source:
        raise UserError(f"loss.policy={run.config.loss.policy}: its file changed while the run uses it; start it again")


def rollout_batch(
    rollouts: pa.Table,
    rewards: pa.Table,
    logprobs: pa.Table | None,
    reference: pa.Table | None,
    config: RunConfig,
    turns: pa.Table | None = None,
) -> tuple[RolloutBatch, dict[str, float]]:
    """Stored tables as the batch of an update, and the effect of `correction.seq_logprob_error_threshold` on it.

    Rows of all tables correspond. Without `logprobs` the old ones are to be those of the update's forward. With
    `environment.advantage: turn`, advantages differ by `turns`.

    Raises:
        UserError: a reward is not finite (a step of the user's own may have made it).
    """
    for row in rewards.select(["group", "sample", "reward"]).to_pylist():
        check_reward(row["reward"], row["group"], row["sample"])
    values = torch.tensor(rewards["reward"].to_pylist(), dtype=torch.float64)
    groups = torch.tensor(rewards["group"].to_pylist())
    batch = RolloutBatch(
        sequences=policy_batch(rollouts, config.rollout),
        mask=padded(rollouts["written"], torch.bool, False),
        rollout_logprobs=padded(rollouts["logprobs"], torch.float32, 0.0),
        old_logprobs=padded(logprobs["logprobs"], torch.float32, 0.0) if logprobs is not None else None,
        reference_logprobs=padded(reference["logprobs"], torch.float32, 0.0) if reference else None,
        advantages=torch.zeros(len(values)),
        keep=torch.tensor(rewards["keep"].to_pylist()),
    )
    batch, masking = without_large_errors(batch, values, config.correction.seq_logprob_error_threshold)
    counted = batch.mask & batch.keep[:, None]
    kept = counted.any(dim=1)
    if batch.old_logprobs is not None:
        rule = named_correction(config.correction).rule
        verdict = correct(rule, batch.old_logprobs, batch.rollout_logprobs, counted)
        kept, counted = verdict.keep, verdict.counted
    scores = Scores(
        rewards=values,
        groups=groups,
        keep=kept if config.correction.baseline == "kept" else torch.ones_like(batch.keep),
        mask=counted,
        penalties=reward_penalties(batch, config),
    )
    estimator, epsilon = ESTIMATORS[config.loss.advantage], config.loss.advantage_epsilon
    if turn_advantages_asked(config):
        assert turns is not None, "the pipeline was rewired"
        advantages = turn_advantages(scores, turn_rewards(rewards, turns), estimator, epsilon)
    else:
        advantages = estimator(scores, epsilon)
    centred_rewards = centred(values, groups, scores.keep).float()
    return replace(batch, advantages=advantages.float(), centred_rewards=centred_rewards), masking


def observed_tokens(rollouts: pa.Table, turns: pa.Table, columns: int) -> Tensor:
    """Bool [rows, columns]: the tokens of environments by the ranges of turns, independent of `written`."""
    places = enumerate(zip(*(rollouts[name].to_pylist() for name in ORDERED), strict=True))
    rows = {place: row for row, place in places}
    observed = torch.zeros(len(rows), columns, dtype=torch.bool)
    for turn in turns.select([*ORDERED, "end", "observation_end"]).to_pylist():
        observed[rows[turn["group"], turn["sample"]], turn["end"] : turn["observation_end"]] = True
    return observed


def turn_rewards(rewards: pa.Table, turns: pa.Table) -> list[TurnReward]:
    """All turns, each with the number of its row in `rewards`; turn 0 is what the environment began with."""
    places = zip(rewards["group"].to_pylist(), rewards["sample"].to_pylist(), strict=True)
    rows = {place: row for row, place in enumerate(places)}
    names = ["group", "sample", "turn", "begin", "end", "reward"]
    return [
        TurnReward(rows[turn["group"], turn["sample"]], turn["turn"], turn["begin"], turn["end"], turn["reward"])
        for turn in turns.select(names).to_pylist()
    ]


def turn_advantages_asked(config: RunConfig) -> bool:
    """True where advantages differ by turn."""
    return config.environment is not None and config.environment.advantage == "turn"


def rows_with_signal(rewards: pa.Table, turns: pa.Table | None, keep: Tensor | None = None) -> Tensor:
    """Bool [rows]: those of groups whose kept rewards differ or, with `turns`, those of the same turn of theirs."""
    values = torch.tensor(rewards["reward"].to_pylist(), dtype=torch.float64)
    groups = torch.tensor(rewards["group"].to_pylist())
    if turns is None:
        return informative(values, groups, keep)
    return informative_turns(values, groups, turn_rewards(rewards, turns), keep)


def centred(rewards: Tensor, groups: Tensor, rows: Tensor) -> Tensor:
    """FP64 [B]: rewards minus the mean reward of `rows` in the group of their prompt.

    Written apart from the advantages, which it judges (`rl.objective.reward_slope`). Both are relative to
    the smallest reward of the group: what rounding leaves of a reward at the mean has the same sign.
    """
    found, place = groups.unique(return_inverse=True)
    counts = torch.bincount(place[rows], minlength=len(found))
    lowest = torch.full((len(found),), torch.inf, dtype=torch.float64)
    lowest = lowest.scatter_reduce(0, place[rows], rewards[rows].double(), "amin").where(counts > 0, 0.0)
    above = rewards - lowest[place]
    sums = torch.bincount(place[rows], above[rows], len(found))
    return above - (sums / counts.clamp_min(1))[place]


def without_large_errors(
    batch: RolloutBatch, rewards: Tensor, threshold: float | None
) -> tuple[RolloutBatch, dict[str, float]]:
    """The batch without rows whose mean of exp(|old - rollout|) exceeds a bound, and NeMo RL's metrics of that."""
    if threshold is None:
        return batch, {}
    assert batch.old_logprobs is not None, "the configuration was checked"
    mask = batch.mask & batch.keep[:, None]
    errors, rows = row_errors(log_ratio(batch.old_logprobs, batch.rollout_logprobs, mask), mask), mask.any(dim=1)
    kept = rows & (errors <= threshold)
    return replace(batch, keep=kept), row_error_metrics(errors, rows, kept, rewards)


def reward_penalties(batch: RolloutBatch, config: RunConfig) -> Tensor | None:
    """Penalty of `loss.reward_kl` on the rewards at each token, [B, C]; None where it is 0."""
    if config.loss.reward_kl == 0:
        return None
    assert batch.reference_logprobs is not None, "loss.reward_kl needs the reference step"
    assert batch.old_logprobs is not None, "the configuration was checked"
    loss = config.loss
    return kl_penalties(
        batch.old_logprobs, batch.reference_logprobs, batch.mask, loss.reward_kl, loss.reward_kl_estimate
    )
