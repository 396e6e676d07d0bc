"""Metrics of prompts that a step draws by use: with `rollout.refill` and `rollout.retire_after`."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from fp8core.config.run import RunConfig
from fp8core.metric import Curve, Metric

BATCHES = Metric(
    "rollout/batches",
    "batches of prompts that the step generated. *At `rollout.refill.max_batches`: raise it, or choose other data.*",
)
GROUPS = Metric("rollout/groups_with_signal", "groups with a signal that the step learns from")
DRAWN_REWARD = Metric("reward/drawn_mean", "mean reward of all that was generated", unit="mean reward of the step")
WASTED = Metric(
    "rollout/wasted_share",
    "share of generated tokens in groups that the step does not learn from. *Rises: set `rollout.retire_after`, or "
    "choose other data.*",
    unit="share of generated tokens",
    curve=Curve("signals", "Wasted tokens", include=(0.0, 1.0)),
    numbers={"share of wasted tokens, mean": "mean"},
)
RETIRED = Metric("rollout/retired_prompts", "prompts that `rollout.retire_after` draws less often")
METRICS = (BATCHES, GROUPS, DRAWN_REWARD, WASTED, RETIRED)


def draw_metrics(visits: pa.Table, draws: Mapping[str, Any], config: RunConfig) -> dict[str, float]:
    """`draws`: after the step."""
    metrics = dict[str, float]()
    if config.rollout.refill is not None:
        rows = visits.to_pylist()
        learnt_rows = [row for row in rows if row["signal"] and not row["dropped"]]
        learnt_tokens, tokens = (sum(row["tokens"] for row in each) for each in (learnt_rows, rows))
        metrics |= {
            BATCHES.name: len(rows) / config.rollout.drawn_prompts,
            GROUPS.name: float(len(learnt_rows)),
            DRAWN_REWARD.name: sum(row["reward"] for row in rows) / len(rows),
            WASTED.name: 1 - learnt_tokens / max(1, tokens),
        }
    if (retire_after := config.rollout.retire_after) is not None:
        metrics[RETIRED.name] = float(sum(streak >= retire_after for streak in draws["streaks"].values()))
    return metrics
