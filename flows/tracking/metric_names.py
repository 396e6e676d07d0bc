"""The names that MLflow shows a training's metrics by; records, reports and bounds have the names of the tasks.

MLflow draws one section of charts for each word before a slash, sorted by that word. So headline metrics come first, as
`core/...`. Every other one is below `detail/`.
"""

from collections.abc import Mapping

from fp8core.metrics import time
from fp8core.metrics.registry import METRICS, find_metric

CORE = "core/"
DETAIL = "detail/"


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics by MLflow's names; some become their distance from the ideal."""
    return {shown_name(name): find_metric(name).headline_value(value) for name, value in metrics.items()}


def shown_name(name: str) -> str:
    headline = find_metric(name).headline
    return f"{CORE}{headline}" if headline else f"{DETAIL}{name}"


def model_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a checkpoint, from those of its step, by the names of the run's own."""
    names = [metric.name for metric in METRICS if metric.of_checkpoint]
    return shown_metrics({name: metrics[name] for name in names if name in metrics})


TIME_METRICS = (
    *(f"{CORE}{metric.headline}" for metric in time.METRICS if metric.headline),
    f"{DETAIL}time/",
    "system/",
)
"""Beginnings of the names of metrics that two equal trainings need not share."""
