"""Metrics of the rewards of a step, and means by source where `data` is a list."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fp8core.metric import Column, Curve, Metric
from fp8core.rewards.scorer import OUTCOMES
from fp8core.rl.advantages import informative
from fp8core.store.tables import SCORE, SOURCE, row_numbers, scores_of

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


SOURCE_REWARD = Metric(
    "reward/source/*",
    "mean reward of the completions of that source, where `data` is a list",
    unit="mean reward of the step",
    better="higher",
    curve=Curve("signals", "Reward by source", include=(0.0, 1.0), parts=True),
)
SOURCE_LENGTH = Metric(
    "rollout/length_source/*",
    "tokens of a completion of that source in the mean",
    unit="tokens, mean of the step",
    curve=Curve("signals", "Completion length by source", include=(0.0,), parts=True),
)
SOURCE_METRICS = (SOURCE_REWARD, SOURCE_LENGTH)


def means_by_source(sources: Sequence[str], values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """For each source the mean of its values by name; these and `sources` are parallel."""
    rows: dict[str, list[int]] = defaultdict(list)
    for number, source in enumerate(sources):
        rows[source].append(number)
    return {
        source: {name: fmean(column[number] for number in rows[source]) for name, column in values.items()}
        for source in sorted(rows)
    }


def source_metrics(rewards: pa.Table, rollouts: pa.Table, lengths: Sequence[float]) -> dict[str, float]:
    """`lengths`: of `rollouts`, row by row. Empty where `data` is a single source."""
    if SOURCE.name not in rewards.column_names:
        return {}
    numbers = row_numbers(rollouts)
    columns = {
        SOURCE_REWARD.name: rewards["reward"].to_pylist(),
        SOURCE_LENGTH.name: [lengths[numbers[key]] for key in row_numbers(rewards)],
    }
    means = means_by_source(rewards[SOURCE.name].to_pylist(), columns)
    return {name.replace("*", source): value for source, each in means.items() for name, value in each.items()}
