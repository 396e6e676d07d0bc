"""Metrics that evaluation and precision gap have as they are, for step 0 too, and series of metrics over steps."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from fp8core.metric import Column, Curve, Metric, Summary

History = Sequence[Mapping[str, float]]
Interval = tuple[float, float]
"""Readings of one clock in seconds, start and end."""

STEP = "step"
HELDOUT = Metric(
    "reward/heldout_accuracy",
    "mean score of greedy answers to held-out prompts. *Falls while the mean rises: more data, a smaller "
    "`training.learning_rate`, or `loss.reference_kl`.*",
    unit="share of unseen prompts right",
    better="higher",
    headline="2_heldout",
    of_checkpoint=True,
    form="decimals",
    curve=Curve("learning", "Held-out accuracy", include=(0.0, 1.0)),
    column=Column("held-out", 8),
    numbers={"held-out accuracy, first": "first", "held-out accuracy, last": "last", "held-out accuracy, best": "max"},
)
HELDOUT_OF_SOURCE = Metric(
    "reward/heldout_source/*",
    "held-out accuracy of that source, where `data` is a list",
    unit="share of unseen prompts right",
    better="higher",
    curve=Curve("signals", "Held-out accuracy by source", include=(0.0, 1.0), parts=True),
)
HELDOUT_LENGTH = Metric("reward/heldout_length_mean", "tokens of those answers")


def _gap(name: str, text: str, number: str = "") -> Metric:
    numbers: Mapping[str, Summary] = {f"FP8 from BF16 at step 0, {number}": "first"} if number else {}
    return Metric(f"rollout/precision_gap_{name}", text, numbers=numbers)


GAP = _gap("nats", "mean |difference| of log-probs")
GAP_PROMPTS = _gap("prompts", "number of prompts")
GAP_DIFFERENCE = _gap("difference", "paired difference of accuracy ([by part](../guides/evaluate.md#parts-of-fp8))")
GAP_LOW = _gap("difference_low", "low end of its 95 % interval")
GAP_HIGH = _gap("difference_high", "high end of its 95 % interval")
OF_START: Mapping[str, Mapping[str, Metric]] = {
    "evaluation": {"accuracy": HELDOUT, "length_mean": HELDOUT_LENGTH},
    "precision_gap": {
        "nats": GAP,
        "k3": _gap("k3", "k3 divergence"),
        "error": _gap("error", "token multiplicative probability error"),
        "kl": _gap("kl", "KL of whole distributions", "KL of prompts (nats per token)"),
        "same_choice": _gap("same_choice", "tokens with one first choice", "same first choice, share of tokens"),
        # Not every prompt has an answer that can be written, so a run may lack this one.
        "answer_shift": _gap("answer_shift", "change of right answers' log-prob", "log-prob of right answers (nats)"),
        "accuracy.value": _gap("accuracy", "held-out accuracy in FP8"),
        "bf16_accuracy.value": _gap("bf16_accuracy", "held-out accuracy in BF16"),
        "difference.value": GAP_DIFFERENCE,
        "difference.low": GAP_LOW,
        "difference.high": GAP_HIGH,
        "prompts": GAP_PROMPTS,
    },
}
"""Kind of an artifact of step 0 -> field, with dots -> metric."""


def start_metrics(kind: str, content: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that an artifact of `OF_START` has as they are; it may be empty."""
    fields = OF_START.get(kind, {}) if content else {}
    values = {metric.name: _field(content, path) for path, metric in fields.items()}
    of_sources = {
        HELDOUT_OF_SOURCE.name.replace("*", source): part["accuracy"]
        for source, part in content.get("sources", {}).items()
    }
    return {name: value for name, value in values.items() if value is not None} | of_sources


def _field(content: Any, path: str) -> float | None:
    value: float | None = reduce(lambda part, key: part[key], path.split("."), content)
    return value


def series(history: History, name: str) -> tuple[list[int], list[float]]:
    points = [(int(row[STEP]), row[name]) for row in history if name in row]
    return [step for step, _ in points], [value for _, value in points]
