"""The tables of a report: what trainings came to, in which settings they differ, and who made them with what."""

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from fp8core.config.load import NOT_NUMBERS, leaves
from fp8core.config.run import public_dump
from fp8core.report.axis import short
from fp8core.report.console import format_tmpe
from fp8core.report.page import Table
from fp8core.report.run_charts import ESS, K3
from fp8core.report.run_data import RunData
from fp8core.report.summary import EDGE_STEPS, ENTROPY, HELDOUT, LENGTH, MISSING, REWARD, TMPE, TOKENS_DIFFERING, series

_DIGITS = 12


def number_rows(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """A row for each number, its name first and then its value for each run."""
    rows: list[tuple[str, Callable[[RunData], str]]] = [
        ("state", lambda run: run.status),
        (f"reward, mean of the first {EDGE_STEPS} steps", _over(REWARD, lambda values: fmean(values[:EDGE_STEPS]))),
        (f"reward, mean of the last {EDGE_STEPS} steps", _over(REWARD, lambda values: fmean(values[-EDGE_STEPS:]))),
        ("held-out accuracy, first", _over(HELDOUT, lambda values: values[0])),
        ("held-out accuracy, last", _over(HELDOUT, lambda values: values[-1])),
        ("held-out accuracy, best", _over(HELDOUT, max)),
        ("completion length, last step (tokens)", _over(LENGTH, lambda values: values[-1])),
        ("entropy, last step (nats per token)", _over(ENTROPY, lambda values: values[-1])),
        ("token multiplicative probability error, mean", _over(TMPE, fmean, format_tmpe)),
        ("token multiplicative probability error, largest", _over(TMPE, max, format_tmpe)),
        ("k3 divergence, mean (nats)", _over(K3, fmean)),
        ("k3 divergence, largest (nats)", _over(K3, max)),
        ("effective sample size, smallest", _over(ESS, min, lambda value: f"{value:.6g}")),
        ("tokens whose log-probs differ", _over(TOKENS_DIFFERING, sum, lambda value: f"{value:,.0f}")),
        ("tokens generated", _over("rollout/tokens", sum, lambda value: f"{value:,.0f}")),
        ("tokens generated per second of rollout", _rollout_speed),
        ("median seconds of a step", lambda run: short(median(run.busy.values())) if run.busy else MISSING),
        ("weights", _weights),
    ]
    return [(name, *(value(run) for run in runs)) for name, value in rows]


def numbers_table(runs: Sequence[RunData]) -> Table:
    """`number_rows` as a table."""
    return Table("What the runs came to", ["", *(run.label for run in runs)], number_rows(runs))


def difference_table(runs: Sequence[RunData]) -> Table:
    """Settings that are not the same in all runs."""
    settings = [run_settings(run) for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    rows = [
        (key, "no" if key.partition(".")[0] in NOT_NUMBERS else "yes", *values)
        for key in keys
        if len(set(values := [one.get(key, "absent") for one in settings])) > 1
    ]
    return Table("Settings that differ", ["setting", "changes numbers", *(run.label for run in runs)], rows)


def settings_table(run: RunData) -> Table:
    """Every setting of a run, folded."""
    return Table(f"Every setting of {run.label}", ["setting", "value"], list(run_settings(run).items()), folded=True)


def run_settings(run: RunData) -> dict[str, str]:
    """Dotted key -> value as JSON; of a configuration that this version cannot read, as it is in run.json."""
    config = run.evidence.config
    content: Mapping[str, Any] = run.evidence.description.config if config is None else public_dump(config)
    return {key: json.dumps(value) for key, value in leaves(content).items()}


def provenance_table(run: RunData) -> Table:
    """Folder, processes, code, machine and libraries of a run."""
    return Table(run.label, ["", ""], run.provenance.lines(run.evidence))


def _over(
    metric: str, summary: Callable[[list[float]], float], form: Callable[[float], str] = short
) -> Callable[[RunData], str]:
    def value(run: RunData) -> str:
        _, values = series(run.history, metric)
        return form(summary(values)) if values else MISSING

    return value


def _rollout_speed(run: RunData) -> str:
    """Over the steps of which both tokens and seconds are known."""
    seconds = run.seconds.get("rollout", {})
    steps, tokens = series(run.history, "rollout/tokens")
    known = [(count, seconds[step]) for step, count in zip(steps, tokens, strict=True) if step in seconds]
    spent = sum(second for _, second in known)
    return short(sum(count for count, _ in known) / spent) if spent > 0 else MISSING


def _weights(run: RunData) -> str:
    steps = run.evidence.steps
    return steps[max(steps)].entry.weights_digest[:_DIGITS] if steps else MISSING
