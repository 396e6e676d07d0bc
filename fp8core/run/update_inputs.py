"""The batch of an update: stored rollouts and rewards, of the rows that filters and bounds have left."""

import pyarrow as pa
import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.rewards.scorer import check_reward
from fp8core.rl.advantages import ESTIMATORS, Groups, informative
from fp8core.rl.batch import RolloutBatch, padded
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
) -> RolloutBatch:
    """Stored tables as the batch of an update.

    Rows of all tables correspond. Without `logprobs` the old ones are the rollout's own, or are to be those of the
    update's forward (`logprobs.source`). Raises UserError: a reward is not finite (a step of the user's own may have
    made it)."""
    for key, reward in zip(keys_of(rewards), rewards["reward"].to_pylist(), strict=True):
        check_reward(reward, key)
    old = rollouts if logprobs is None and config.logprobs.source == "rollout" else logprobs
    values = torch.tensor(rewards["reward"].to_pylist(), dtype=torch.float64)
    groups = torch.tensor(rewards["group"].to_pylist())
    counted = counted_rows(rewards, config)
    estimator = ESTIMATORS[config.loss.advantage]
    return RolloutBatch(
        sequences=policy_batch(rollouts),
        mask=padded(rollouts["written"], torch.bool, False),
        rollout_logprobs=padded(rollouts["logprobs"], torch.float32, 0.0),
        old_logprobs=padded(old["logprobs"], torch.float32, 0.0) if old is not None else None,
        reference_logprobs=padded(reference["logprobs"], torch.float32, 0.0) if reference else None,
        advantages=estimator(Groups.of(values, groups, counted), config.loss.advantage_epsilon).float(),
        keep=torch.tensor(rewards["keep"].to_pylist()),
        centred_rewards=centred(values, groups, counted).float(),
    )


def observed_tokens(rollouts: pa.Table, turns: pa.Table, columns: int) -> Tensor:
    """Bool [rows, columns]: the tokens of environments by the ranges of turns, independent of `written`."""
    rows = row_numbers(rollouts)
    observed = torch.zeros(len(rows), columns, dtype=torch.bool)
    ranges = zip(turns["end"].to_pylist(), turns["observation_end"].to_pylist(), strict=True)
    for key, (start, end) in zip(keys_of(turns), ranges, strict=True):
        observed[rows[key], start:end] = True
    return observed


def counted_rows(rewards: pa.Table, config: RunConfig) -> Tensor:
    """Bool [rows]: those that make the baseline of their group, whether a bound rejects them or not."""
    outcomes, keep = rewards["outcome"].to_pylist(), rewards["keep"].to_pylist()
    pairs = zip(outcomes, keep, strict=True)
    return torch.tensor([kept and counts(outcome, config) for outcome, kept in pairs], dtype=torch.bool)


def rows_with_signal(rewards: pa.Table, keep: Tensor) -> Tensor:
    """Bool [rows]: those of groups whose kept scores differ."""
    values = torch.tensor(scores_of(rewards).to_pylist(), dtype=torch.float64)
    return informative(values, torch.tensor(rewards["group"].to_pylist()), keep)


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


def learnt_tokens(rollouts: pa.Table, rewards: pa.Table, config: RunConfig) -> Tensor:
    """Bool [B, C]: tokens of the rows of `rollout_batch` that are kept, whose stored log-probs an update begins with.

    With `logprobs.source` rollout they are those of the first update: later ones begin with another policy."""
    learnt = padded(rollouts["written"], torch.bool, False) & torch.tensor(rewards["keep"].to_pylist())[:, None]
    if config.logprobs.source == "rollout":
        for later in minibatches(learnt, learnt.any(dim=1), config.training.minibatches)[1:]:
            learnt[later] = False
    return learnt
