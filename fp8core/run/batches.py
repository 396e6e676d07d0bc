"""Stored rollouts and rewards as batches of a trainer, and its scores as stored tables."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.numerics.kv_scales import LayerAmax, LayerScales, scale_distance, scales_from_statistics
from fp8core.rl.advantages import ESTIMATORS, Groups, informative
from fp8core.rl.batch import RolloutBatch, TokenBatch, column, pad_column, routes, sampled_rows
from fp8core.rl.objective import row_advantages
from fp8core.rollout.engine import PolicyScales
from fp8core.run.context import StepContext
from fp8core.run.rollouts import check_reward, counts
from fp8core.store.artifacts import Ref
from fp8core.store.tables import ADVANTAGES, COMPLETION_KEY, LOGPROBS, keys_of, row_numbers, scores_of
from fp8core.training.trainer import ScoredBatch, Trainer, TrainReport, minibatches


def scales_of(config: RunConfig, amax: list[LayerAmax]) -> list[LayerScales]:
    return scales_from_statistics(amax, config.calibration.margin, config.precision.recipe.cache)


def lag_error(config: RunConfig, in_force: PolicyScales, statistics: dict[str, Any]) -> float:
    """Distance of a step's scales from those its own statistics give, in powers of two (`scale_distance`)."""
    fresh = scales_of(config, read_amax(statistics))
    return scale_distance(in_force.layers, fresh)


def store_scales(run: StepContext, version: int, amax: list[LayerAmax]) -> Ref:
    content: dict[str, Any] = {
        "version": version,
        "rule": run.config.precision.recipe.cache,
        "layers": [vars(layer) for layer in scales_of(run.config, amax)],
        "amax": [vars(layer) for layer in amax],
    }
    return run.store.put_json("scales", content)


def read_scales(run: StepContext, scales: Ref) -> PolicyScales:
    content = run.store.get_json(scales)
    return PolicyScales(content["version"], tuple(LayerScales(**layer) for layer in content["layers"]))


def read_amax(content: dict[str, Any]) -> list[LayerAmax]:
    return [LayerAmax(**layer) for layer in content["amax"]]


SCORED_COLUMNS = (*COMPLETION_KEY, "prompt_tokens", "tokens", "experts")
"""Columns of rollouts that are scored; there are experts where the rollout recorded them."""
UPDATE_COLUMNS = (*SCORED_COLUMNS, "written", "logprobs")
"""Columns of rollouts that an update is made of."""


def trainer_of_policy(run: StepContext, policy: Ref) -> Trainer:
    run.sleep_engine()
    trainer = run.trainer
    version = run.store.get_json(policy)["version"]
    assert trainer.version == version, "the trainer does not hold the policy of this step"
    return trainer


def stored_scores(run: StepContext, version: int, rollouts: pa.Table, score: ScoredBatch) -> dict[str, Ref]:
    store = run.store
    statistics = {
        "version": version,
        "amax": [vars(layer) for layer in score.statistics.amax()],
        "saturated_share": score.statistics.saturated_share(),
    }
    return {
        "logprobs": store.put_table("logprobs", logprob_table(rollouts, score)),
        "kv_statistics": store.put_json("kv_statistics", statistics),
    }


def stored_update(run: StepContext, report: TrainReport, batch: RolloutBatch, rollouts: pa.Table) -> dict[str, Ref]:
    store = run.store
    values = pa.array(row_advantages(batch, run.config.loss, run.config.correction).numpy())
    columns = [*(rollouts[name] for name in COMPLETION_KEY), values]
    return {
        "next_policy": store.put_json("policy", {"version": report.version, "weights_digest": report.digest}),
        "train_report": store.put_json("train_report", report.content()),
        "advantages": store.put_table("advantages", pa.table(columns, schema=ADVANTAGES)),
    }


def compared_rows(config: RunConfig, index: int, policy_mask: Tensor) -> Tensor:
    """bool [rows]: completions whose log-probs under both policies are compared; `policy_mask`: bool [rows, C]."""
    if config.logprobs.source != "rollout":
        return torch.ones(len(policy_mask), dtype=torch.bool)
    rows = torch.zeros(len(policy_mask), dtype=torch.bool)
    rows[sampled_rows(policy_mask, config.logprobs.audit_share, f"audit/{config.seed}/{index}")] = True
    return rows


def token_batch(rollouts: pa.Table, config: RunConfig) -> TokenBatch:
    prompts, completions = (rollouts[name].to_pylist() for name in ("prompt_tokens", "tokens"))
    return TokenBatch.of(prompts, completions, truncation=config.rollout.truncation)


def policy_batch(rollouts: pa.Table, config: RunConfig) -> TokenBatch:
    """With the experts to replay; reference and teacher choose their own."""
    prompts, completions = (rollouts[name].to_pylist() for name in ("prompt_tokens", "tokens"))
    experts = routes(rollouts["experts"]) if "experts" in rollouts.column_names else None
    return TokenBatch.of(prompts, completions, experts, config.rollout.truncation)


def logprob_table(rollouts: pa.Table, score: ScoredBatch) -> pa.Table:
    lengths = pc.list_value_length(rollouts["tokens"]).to_numpy().astype(np.int64)
    columns = {
        "group": rollouts["group"],
        "sample": rollouts["sample"],
        "logprobs": column(score.logprobs, lengths),
        "entropy": column(score.entropy, lengths),
    }
    return pa.table(columns, schema=LOGPROBS)


def rollout_batch(
    rollouts: pa.Table, rewards: pa.Table, logprobs: pa.Table | None, signals: Mapping[str, pa.Table], config: RunConfig
) -> RolloutBatch:
    """The batch of an update; `signals`: tables of `reference`, `teacher` and `turns`, as far as there are any.

    Raises UserError: a reward is not finite (a step of the user's own may have made it)."""
    for key, reward in zip(keys_of(rewards), rewards["reward"].to_pylist(), strict=True):
        check_reward(reward, key)
    old = rollouts if logprobs is None and config.logprobs.source == "rollout" else logprobs
    values = torch.tensor(rewards["reward"].to_pylist(), dtype=torch.float64)
    groups = torch.tensor(rewards["group"].to_pylist())
    baseline = baseline_mask(rewards, config)
    estimator = ESTIMATORS[config.loss.advantage]
    policy_mask = pad_column(rollouts["written"], torch.bool, False)
    turns = signals.get("turns")
    return RolloutBatch(
        sequences=policy_batch(rollouts, config),
        policy_mask=policy_mask,
        rollout_logprobs=logprob_tensor(rollouts),
        old_logprobs=None if old is None else logprob_tensor(old),
        reference_logprobs=logprob_tensor(signals["reference"]) if "reference" in signals else None,
        teacher_logprobs=logprob_tensor(signals["teacher"]) if "teacher" in signals else None,
        observation_mask=None if turns is None else observation_mask(rollouts, turns, policy_mask.shape[1]),
        advantages=estimator(Groups.of(values, groups, baseline), config.loss.advantage_epsilon).float(),
        row_mask=torch.tensor(rewards["keep"].to_pylist()),
        centred_rewards=centred_rewards(values, groups, baseline).float(),
    )


def logprob_tensor(table: pa.Table) -> Tensor:
    return pad_column(table["logprobs"], torch.float32, 0.0)


def observation_mask(rollouts: pa.Table, turns: pa.Table, columns: int) -> Tensor:
    """Bool [rows, columns]: the tokens of environments."""
    rows = row_numbers(rollouts)
    mask = torch.zeros(len(rows), columns, dtype=torch.bool)
    ranges = zip(turns["end"].to_pylist(), turns["observation_end"].to_pylist(), strict=True)
    for key, (start, end) in zip(keys_of(turns), ranges, strict=True):
        mask[rows[key], start:end] = True
    return mask


def baseline_mask(rewards: pa.Table, config: RunConfig) -> Tensor:
    """Bool [rows]: those that make the baseline of their group, whether a bound rejects them or not."""
    pairs = zip(rewards["keep"].to_pylist(), rewards["outcome"].to_pylist(), strict=True)
    return torch.tensor([keep and counts(outcome, config) for keep, outcome in pairs], dtype=torch.bool)


def rows_with_signal(rewards: pa.Table, mask: Tensor) -> Tensor:
    """Bool [rows]: those of groups whose scores differ within the mask."""
    values = torch.tensor(scores_of(rewards).to_pylist(), dtype=torch.float64)
    return informative(values, torch.tensor(rewards["group"].to_pylist()), mask)


def centred_rewards(rewards: Tensor, groups: Tensor, rows: Tensor) -> Tensor:
    """FP64 [B]: rewards minus the mean reward of `rows` in the group of their prompt.

    Both are relative to the smallest reward of the group: what rounding leaves of a reward at the mean has the same
    sign."""
    labels, place = groups.unique(return_inverse=True)
    counts = torch.bincount(place[rows], minlength=len(labels))
    lowest = torch.full((len(labels),), torch.inf, dtype=torch.float64)
    lowest = lowest.scatter_reduce(0, place[rows], rewards[rows].double(), "amin").where(counts > 0, 0.0)
    above = rewards - lowest[place]
    sums = torch.bincount(place[rows], above[rows], len(labels))
    return above - (sums / counts.clamp_min(1))[place]


def first_update_mask(rollouts: pa.Table, rewards: pa.Table, config: RunConfig) -> Tensor:
    """Bool [B, C]: tokens whose stored log-probs an update begins with; of several updates, the first one's."""
    mask = pad_column(rollouts["written"], torch.bool, False) & torch.tensor(rewards["keep"].to_pylist())[:, None]
    if config.logprobs.source == "rollout":
        for later in minibatches(mask, mask.any(dim=1), config.training.minibatches)[1:]:
            mask[later] = False
    return mask
