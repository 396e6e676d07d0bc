"""The batch of an update: stored rollouts and rewards, of the rows that filters and bounds have left."""

from dataclasses import replace

import pyarrow as pa
import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.rewards.scorer import check_reward
from fp8core.rl.advantages import (
    ESTIMATORS,
    OVER_TOKENS,
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
from fp8core.run.scoring import SCORED_COLUMNS, policy_batch
from fp8core.run.verdicts import counts
from fp8core.store.tables import keys_of, row_numbers, scores_of
from fp8core.training.trainer import minibatches

UPDATE_COLUMNS = (*SCORED_COLUMNS, "written", "logprobs")
"""Columns of rollouts that an update is made of."""


def rollout_batch(
    rollouts: pa.Table,
    rewards: pa.Table,
    logprobs: pa.Table | None,
    reference: pa.Table | None,
    config: RunConfig,
    turns: pa.Table | None = None,
) -> tuple[RolloutBatch, dict[str, float]]:
    """Stored tables as the batch of an update, and the effect of `correction.seq_logprob_error_threshold` on it.

    Rows of all tables correspond. Without `logprobs` the old ones are the rollout's own, or are to be those of the
    update's forward (`logprobs.source`). Raises UserError: a reward is not finite (a step of the user's own may have
    made it)."""
    for key, reward in zip(keys_of(rewards), rewards["reward"].to_pylist(), strict=True):
        check_reward(reward, key)
    old = rollouts if logprobs is None and config.logprobs.source == "rollout" else logprobs
    values = torch.tensor(rewards["reward"].to_pylist(), dtype=torch.float64)
    groups = torch.tensor(rewards["group"].to_pylist())
    batch = RolloutBatch(
        sequences=policy_batch(rollouts, config.rollout),
        mask=padded(rollouts["written"], torch.bool, False),
        rollout_logprobs=padded(rollouts["logprobs"], torch.float32, 0.0),
        old_logprobs=padded(old["logprobs"], torch.float32, 0.0) if old is not None else None,
        reference_logprobs=padded(reference["logprobs"], torch.float32, 0.0) if reference else None,
        advantages=torch.zeros(len(values)),
        keep=torch.tensor(rewards["keep"].to_pylist()),
    )
    batch, masking = without_large_errors(batch, values, config.correction.seq_logprob_error_threshold)
    counted = batch.mask & batch.keep[:, None]
    kept = counted.any(dim=1)
    judged = config.correction.baseline == "kept" or config.loss.advantage in OVER_TOKENS
    if judged and batch.old_logprobs is not None:
        rule = named_correction(config.correction).rule
        verdict = correct(rule, batch.old_logprobs, batch.rollout_logprobs, counted)
        kept, counted = verdict.keep, verdict.counted
    scores = Scores(
        rewards=values,
        groups=groups,
        keep=kept if config.correction.baseline == "kept" else counted_rows(rewards, config),
        mask=counted,
        penalties=reward_penalties(batch, config),
    )
    estimator, epsilon = ESTIMATORS[config.loss.advantage], config.loss.advantage_epsilon
    if turn_advantages_asked(config):
        assert turns is not None, "the pipeline was checked"
        advantages = turn_advantages(scores, turn_rewards(rewards, turns), estimator, epsilon)
    else:
        advantages = estimator(scores, epsilon)
    centred_rewards = centred(values, groups, scores.keep).float()
    return replace(batch, advantages=advantages.float(), centred_rewards=centred_rewards), masking


def observed_tokens(rollouts: pa.Table, turns: pa.Table, columns: int) -> Tensor:
    """Bool [rows, columns]: the tokens of environments by the ranges of turns, independent of `written`."""
    rows = row_numbers(rollouts)
    observed = torch.zeros(len(rows), columns, dtype=torch.bool)
    ranges = zip(turns["end"].to_pylist(), turns["observation_end"].to_pylist(), strict=True)
    for key, (start, end) in zip(keys_of(turns), ranges, strict=True):
        observed[rows[key], start:end] = True
    return observed


def turn_rewards(rewards: pa.Table, turns: pa.Table) -> list[TurnReward]:
    """All turns, each with the number of its row in `rewards`; turn 0 is what the environment began with."""
    rows = row_numbers(rewards)
    parts = zip(*(turns[name].to_pylist() for name in ("turn", "begin", "end", "reward")), strict=True)
    return [TurnReward(rows[key], *part) for key, part in zip(keys_of(turns), parts, strict=True)]


def counted_rows(rewards: pa.Table, config: RunConfig) -> Tensor:
    """Bool [rows]: those that make the baseline of their group, whether a bound rejects them or not."""
    outcomes, keep = rewards["outcome"].to_pylist(), rewards["keep"].to_pylist()
    pairs = zip(outcomes, keep, strict=True)
    return torch.tensor([kept and counts(outcome, config) for outcome, kept in pairs], dtype=torch.bool)


def turn_advantages_asked(config: RunConfig) -> bool:
    return config.environment is not None and config.environment.advantage == "turn"


def rows_with_signal(rewards: pa.Table, turns: pa.Table | None, keep: Tensor | None = None) -> Tensor:
    """Bool [rows]: those of groups whose kept scores differ or, with `turns`, those of the same turn of theirs."""
    values = torch.tensor(scores_of(rewards).to_pylist(), dtype=torch.float64)
    groups = torch.tensor(rewards["group"].to_pylist())
    if turns is None:
        return informative(values, groups, keep)
    return informative_turns(values, groups, turn_rewards(rewards, turns), keep)


def centred(rewards: Tensor, groups: Tensor, rows: Tensor) -> Tensor:
    """FP64 [B]: rewards minus the mean reward of `rows` in the group of their prompt.

    Both are relative to the smallest reward of the group: what rounding leaves of a reward at the mean has the same
    sign."""
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
    if threshold is None:
        return batch, {}
    assert batch.old_logprobs is not None, "the configuration was checked"
    mask = batch.mask & batch.keep[:, None]
    errors, kept = row_errors_within(threshold, batch.old_logprobs, batch.rollout_logprobs, mask)
    return replace(batch, keep=kept), row_error_metrics(errors, mask.any(dim=1), kept, rewards)


def row_errors_within(threshold: float, old: Tensor, sampled: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """FP64 [B]: mean of exp(|old - sampled|) of a row; bool [B]: rows with a token whose mean is within a bound."""
    errors = row_errors(log_ratio(old, sampled, mask), mask)
    return errors, mask.any(dim=1) & (errors <= threshold)


def learnt_tokens(rollouts: pa.Table, rewards: pa.Table, logprobs: pa.Table, config: RunConfig) -> Tensor:
    """Bool [B, C]: tokens of the rows of `rollout_batch` that are kept, whose stored log-probs an update begins with.

    With `logprobs.source` rollout they are those of the first update: later ones begin with another policy."""
    learnt = padded(rollouts["written"], torch.bool, False) & torch.tensor(rewards["keep"].to_pylist())[:, None]
    if (threshold := config.correction.seq_logprob_error_threshold) is not None:
        old, sampled = (padded(table["logprobs"], torch.float32, 0.0) for table in (logprobs, rollouts))
        learnt = learnt & row_errors_within(threshold, old, sampled, learnt)[1][:, None]
    if config.logprobs.source == "rollout":
        for later in minibatches(learnt, learnt.any(dim=1), config.training.minibatches)[1:]:
            learnt[later] = False
    return learnt


def reward_penalties(batch: RolloutBatch, config: RunConfig) -> Tensor | None:
    if config.loss.reward_kl == 0:
        return None
    assert batch.reference_logprobs is not None, "loss.reward_kl needs the reference step"
    assert batch.old_logprobs is not None, "the configuration was checked"
    loss = config.loss
    return kl_penalties(
        batch.old_logprobs, batch.reference_logprobs, batch.mask, loss.reward_kl, loss.reward_kl_estimate
    )
