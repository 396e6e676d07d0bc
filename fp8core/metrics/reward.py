"""Metrics of the rewards of a step."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fp8core.metric import Column, Curve, Metric
from fp8core.rewards.scorer import OUTCOMES
from fp8core.rl.advantages import informative
from fp8core.store.tables import SCORE, scores_of

_SPREAD = "standard deviation of rewards and [scores](../guides/verifiers.md#write-your-own)"
REWARD = Metric(
    "reward/mean",
    "mean reward, before steps that change rewards",
    unit="mean reward of the step",
    better="higher",
    headline="1_reward",
    of_checkpoint=True,
    form="decimals",
    curve=Curve("learning", "Reward", include=(0.0, 1.0)),
    column=Column("reward", 6),
    numbers={"reward, mean of the first steps": "first steps", "reward, mean of the last steps": "last steps"},
)
REWARD_STD = Metric("reward/std", _SPREAD)
SCORE_STD = Metric("reward/score_std", _SPREAD)
SIGNAL = Metric(
    "reward/groups_with_signal",
    "share of prompts whose completions got different scores. *Near 0: the report names cause and action.*",
    unit="share of prompts",
    better="higher",
    headline="groups_with_signal",
    curve=Curve("signals", "Groups with a signal", include=(0.0, 1.0)),
    numbers={"groups with a signal, mean": "mean", "steps in which no group had a signal": "zeros"},
)
KEPT_SHARE = Metric("reward/kept_share", "share of rows with `keep` in the table that `record` reads")
OUTCOME_SHARES: Mapping[str, Metric] = {
    outcome: Metric(
        f"reward/outcome_{outcome}",
        "share of each outcome. *`unparsed`: the template does not state the form of the answer, or completions are "
        "cut off.*",
        unit="share of completions",
        curve=Curve("signals", f"Outcome: {outcome}", include=(0.0, 1.0)),
    )
    for outcome in OUTCOMES
}
VERDICT_SCORE = Metric(
    "reward/verdict", "with several verifiers, the mean score of `reward.verifier`", curve=Curve("own")
)
VERIFIER_SCORES = Metric(
    "reward/*", "the mean score of the verifier of that name in `reward.others`", curve=Curve("own")
)
METRICS = (
    *(REWARD, REWARD_STD, SCORE_STD, SIGNAL, KEPT_SHARE),
    *(*OUTCOME_SHARES.values(), VERDICT_SCORE, VERIFIER_SCORES),
)


def reward_metrics(rewards: pa.Table, baseline: Tensor) -> dict[str, float]:
    """`baseline`: bool [rows], those that make the baseline of their group; spread and signal are theirs."""
    values, scores = (
        torch.tensor(column.to_pylist(), dtype=torch.float64) for column in (rewards["reward"], scores_of(rewards))
    )
    groups = torch.tensor(rewards["group"].to_pylist())
    spread = float(scores[baseline].std(correction=0)) if baseline.any() else 0.0
    mixed_groups = groups[informative(scores, groups, baseline)]
    outcomes = Counter(rewards["outcome"].to_pylist())
    return {
        REWARD.name: float(values.mean()),
        # A replay may find that all episodes failed.
        REWARD_STD.name: float(values[baseline].std(correction=0)) if baseline.any() else 0.0,
        **({SCORE_STD.name: spread} if "score" in rewards.column_names else {}),
        SIGNAL.name: len(mixed_groups.unique()) / len(groups.unique()),
        KEPT_SHARE.name: sum(rewards["keep"].to_pylist()) / rewards.num_rows,
        **{metric.name: outcomes[outcome] / rewards.num_rows for outcome, metric in OUTCOME_SHARES.items()},
        **{
            f"reward/{name.removeprefix(SCORE)}": float(np.mean(rewards[name].to_numpy()))
            for name in rewards.column_names
            if name.startswith(SCORE)
        },
    }
