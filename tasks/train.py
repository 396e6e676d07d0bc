"""One GRPO update from stored rollouts, rewards and log-probs."""

from dataclasses import asdict, replace

import pyarrow as pa
import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.config.steps import NoOptions
from fp8core.errors import UserError
from fp8core.rl.advantages import ESTIMATORS, Scores, kl_penalties
from fp8core.rl.batch import RolloutBatch, padded
from fp8core.rl.correction import correct, log_ratio, row_error_metrics, row_errors
from fp8core.rl.objective import named_correction
from fp8core.rl.user_loss import loss_source
from fp8core.run.context import RunContext
from fp8core.run.policy import read_scales
from fp8core.store.artifacts import Ref
from tasks.logprobs import REPLAYED, layer_scales, replay_batch
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
    optional_inputs={"reference": "logprobs", "teacher": "logprobs"},
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
) -> dict[str, Ref]:
    """Policy v_i becomes v_{i+1}."""
    store = run.directory.store
    trainer = run.ready_trainer()
    assert trainer.version == store.get_json(policy)["version"], "the trainer does not hold the policy of this step"
    batch, masking = rollout_batch(
        store.get_table(rollouts, [*REPLAYED, "written", "logprobs"]),
        store.get_table(rewards),
        store.get_table(logprobs),
        store.get_table(reference) if reference else None,
        run.config,
    )
    taught = padded(store.get_table(teacher)["logprobs"], torch.float32, 0.0) if teacher else None
    batch = replace(batch, teacher_logprobs=taught, draw=(run.config.seed, index))
    refuse_edited_loss(run)
    report = trainer.step(batch, run.config.rollout.temperature, layer_scales(read_scales(run, scales)))
    report = replace(report, correction=report.correction | masking)
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
    rollouts: pa.Table, rewards: pa.Table, logprobs: pa.Table, reference: pa.Table | None, config: RunConfig
) -> tuple[RolloutBatch, dict[str, float]]:
    """Stored tables as the batch of an update, and the effect of `correction.seq_logprob_error_threshold` on it.

    Rows of all tables correspond.

    Raises:
        UserError: a reward is not finite (a step of the user's own may have made it).
    """
    for row in rewards.select(["group", "sample", "reward"]).to_pylist():
        check_reward(row["reward"], row["group"], row["sample"])
    values = torch.tensor(rewards["reward"].to_pylist(), dtype=torch.float64)
    groups = torch.tensor(rewards["group"].to_pylist())
    batch = RolloutBatch(
        sequences=replay_batch(rollouts),
        mask=padded(rollouts["written"], torch.bool, False),
        rollout_logprobs=padded(rollouts["logprobs"], torch.float32, 0.0),
        old_logprobs=padded(logprobs["logprobs"], torch.float32, 0.0),
        reference_logprobs=padded(reference["logprobs"], torch.float32, 0.0) if reference else None,
        advantages=torch.zeros(len(values)),
        keep=torch.tensor(rewards["keep"].to_pylist()),
    )
    batch, masking = without_large_errors(batch, values, config.correction.seq_logprob_error_threshold)
    mask = batch.mask & batch.keep[:, None]
    verdict = correct(named_correction(config.correction).rule, batch.old_logprobs, batch.rollout_logprobs, mask)
    scores = Scores(
        rewards=values,
        groups=groups,
        keep=batch.keep & verdict.keep if config.correction.baseline == "kept" else torch.ones_like(batch.keep),
        mask=verdict.counted,
        penalties=reward_penalties(batch, config),
    )
    advantages = ESTIMATORS[config.loss.advantage](scores, config.loss.advantage_epsilon)
    centred_rewards = centred(values, groups, scores.keep).float()
    return replace(batch, advantages=advantages.float(), centred_rewards=centred_rewards), masking


def centred(rewards: Tensor, groups: Tensor, rows: Tensor) -> Tensor:
    """FP64 [B]: rewards minus the mean reward of `rows` in the group of their prompt.

    Written apart from the advantages, which it judges (`rl.objective.reward_slope`).
    """
    same = (groups[:, None] == groups[None, :]) & rows[None, :]
    return rewards - (same.double() @ rewards) / same.sum(dim=1).clamp_min(1)


def without_large_errors(
    batch: RolloutBatch, rewards: Tensor, threshold: float | None
) -> tuple[RolloutBatch, dict[str, float]]:
    """The batch without rows whose mean of exp(|old - rollout|) exceeds a bound, and NeMo RL's metrics of that."""
    if threshold is None:
        return batch, {}
    mask = batch.mask & batch.keep[:, None]
    errors, rows = row_errors(log_ratio(batch.old_logprobs, batch.rollout_logprobs, mask), mask), mask.any(dim=1)
    kept = rows & (errors <= threshold)
    return replace(batch, keep=kept), row_error_metrics(errors, rows, kept, rewards)


def reward_penalties(batch: RolloutBatch, config: RunConfig) -> Tensor | None:
    """Penalty of `loss.reward_kl` on the rewards at each token, [B, C]; None where it is 0."""
    if config.loss.reward_kl == 0:
        return None
    assert batch.reference_logprobs is not None, "loss.reward_kl needs the reference step"
    loss = config.loss
    return kl_penalties(
        batch.old_logprobs, batch.reference_logprobs, batch.mask, loss.reward_kl, loss.reward_kl_estimate
    )
