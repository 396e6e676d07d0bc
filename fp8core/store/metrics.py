"""The metrics of a run's steps: the names that code reads them by, and those that step 0 has from its artifacts."""

from collections.abc import Mapping, Sequence
from typing import Any

History = Sequence[Mapping[str, float]]
Interval = tuple[float, float]
"""Readings of one clock in seconds, start and end."""

STEP = "step"
# Written tokens by the seconds of the whole step, from its first task to its commit.
TOKENS_PER_SECOND = "core/tokens_per_second"
REWARD = "reward/mean"
HELDOUT = "reward/heldout_accuracy"
LENGTH = "rollout/length_mean"
SIGNAL = "reward/groups_with_signal"
# Followed by an outcome.
OUTCOME = "reward/outcome_"
CUT_OFF = "rollout/cut_off_share"
TOKENS = "rollout/tokens"
ENTROPY = "rollout/entropy"
GRAD_NORM = "train/grad_norm"
TMPE = "alignment/token_mult_prob_error"
TOKENS_DIFFERING, COMPARED = "alignment/tokens_differing", "alignment/tokens"
K3, ESS = "alignment/k3_kl", "alignment/ess"
# Of a run that generates ahead; the last one of a run alone that keeps the cache of older weights.
STALENESS, STALEST = "rollout/staleness_mean", "rollout/staleness_max"
LAG_ESS, OUTSIDE_CLIP = "correction/ess", "correction/share_outside_clip"
UNVERIFIABLE = "rollout/unverifiable"

GAP, GAP_ERROR, GAP_ACCURACY, GAP_BF16, GAP_PROMPTS = (
    f"rollout/precision_gap_{name}" for name in ("nats", "error", "accuracy", "bf16_accuracy", "prompts")
)
GAP_DIFFERENCE, GAP_LOW, GAP_HIGH = (
    f"rollout/precision_gap_{name}" for name in ("difference", "difference_low", "difference_high")
)
# Not every prompt has an answer that can be written, so a run may lack the last one.
GAP_KL, GAP_SAME, GAP_SHIFT = (f"rollout/precision_gap_{name}" for name in ("kl", "same_choice", "answer_shift"))
OF_START: Mapping[str, Mapping[str, str]] = {
    "evaluation": {HELDOUT: "accuracy", "reward/heldout_length_mean": "length_mean"},
    "precision_gap": {GAP: "nats", "rollout/precision_gap_k3": "k3", GAP_ERROR: "error", GAP_PROMPTS: "prompts"},
}


def start_metrics(kind: str, content: Mapping[str, Any]) -> dict[str, float]:
    found = {metric: content[field] for metric, field in OF_START.get(kind, {}).items() if content}
    if kind == "precision_gap":
        found |= {GAP_ACCURACY: content["accuracy"]["value"], GAP_BF16: content["bf16_accuracy"]["value"]}
        ends = {GAP_DIFFERENCE: "value", GAP_LOW: "low", GAP_HIGH: "high"}
        found |= {metric: content["difference"][end] for metric, end in ends.items()}
        known = {GAP_KL: "kl", GAP_SAME: "same_choice", GAP_SHIFT: "answer_shift"}
        found |= {metric: content[field] for metric, field in known.items() if content.get(field) is not None}
    return found


def series(history: History, key: str) -> tuple[list[int], list[float]]:
    measured = [(int(row[STEP]), row[key]) for row in history if key in row]
    return [step for step, _ in measured], [value for _, value in measured]
