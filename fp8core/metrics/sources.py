"""Metrics by source, where `data` is a list."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import pyarrow as pa

from fp8core.metric import Curve, Metric
from fp8core.store.tables import SOURCE, row_numbers

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
METRICS = (SOURCE_REWARD, SOURCE_LENGTH)


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
