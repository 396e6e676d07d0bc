"""The tables of a report: numbers of runs, every step, time by task, settings and provenance."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from fp8core.alignment.bounds import stored_bounds
from fp8core.config.layers import leaves
from fp8core.config.load import NON_NUMERIC_KEYS
from fp8core.config.run import public_dump
from fp8core.metric import Summary
from fp8core.metrics.registry import METRICS
from fp8core.report.chart import COLOURS, MISSING, count_text, format_value, short
from fp8core.report.conclusion import rollout_speed
from fp8core.report.diagnosis import mean_shares
from fp8core.report.run_data import OUTSIDE_TASKS, RunData, time_spent
from fp8core.report.summary import compared_tokens, first_steps, last_steps
from fp8core.store.metrics import GAP, GAP_DIFFERENCE, GAP_HIGH, GAP_LOW, GAP_PROMPTS, History, series


@dataclass(frozen=True)
class Table:
    """Rows of text below a caption. A `folded` table is opened by its caption.

    colours: of the first rows. bars: title -> the percentages of these rows, drawn as one bar.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_folded: bool = False
    colours: Sequence[str] = ()
    bars: Mapping[str, Sequence[float]] = field(default_factory=dict)


_SUMMARIES: Mapping[Summary, Callable[[Sequence[float]], float]] = {
    "first": itemgetter(0),
    "last": itemgetter(-1),
    "first steps": first_steps,
    "last steps": last_steps,
    "mean": fmean,
    "sum": sum,
    "max": max,
    "min": min,
    "zeros": lambda values: values.count(0.0),
}


def numbers_table(runs: Sequence[RunData]) -> Table:
    """Every number that a run has, a column a run."""
    numbers = [_numbers(run) for run in runs]
    rows = [
        (name, *(one[name] or MISSING for one in numbers)) for name in numbers[0] if any(one[name] for one in numbers)
    ]
    return Table("What the runs came to", ["", *(run.label for run in runs)], rows)


def _numbers(run: RunData) -> dict[str, str | None]:
    measured: dict[str, str | None] = {}
    for metric in METRICS:
        _, values = series(run.history, metric.name)
        for label, summary in metric.numbers.items():
            measured[label] = format_value(_SUMMARIES[summary](values), metric.form) if values else None
    speed = rollout_speed(run)
    steps = run.view.steps
    bounds = stored_bounds(run.view.config)
    return {
        "state": run.status,
        **measured,
        "FP8 from BF16 at step 0, held-out accuracy, with 95 % interval": _gap(run.history),
        "tokens whose log-probs were compared": compared_tokens(run.history).words,
        "outcomes of completions, mean of all steps": ", ".join(
            f"{share:.1%} {name}" for name, share in mean_shares(run.history).items()
        ),
        "tokens generated per second of rollout": None if speed is None else short(speed),
        "median seconds of tasks a step": short(median(run.busy.values())) if run.busy else None,
        "bounds on alignment": None if bounds is None else bounds.summary,
        "weights": steps[max(steps)].entry.weights_digest[:12] if steps else None,
    }


def _gap(history: History) -> str | None:
    row = next((row for row in history if GAP.name in row), None)
    if row is None:
        return None
    low = row[GAP_LOW.name]
    high = row[GAP_HIGH.name]
    prompts = int(row[GAP_PROMPTS.name])
    return f"{row[GAP_DIFFERENCE.name]:+.3f} [{low:+.3f}, {high:+.3f}] on {count_text(prompts, 'prompt')}"


def time_table(runs: Sequence[RunData]) -> Table:
    """Seconds of the start's tasks, of every task over all steps, and of the rest, with their share of the whole.

    The tasks that take longest have a colour each. The last colour, black, is too close to the gray of the others.
    """
    times = {run.label: time_spent(run.view) for run in runs}
    whole = {run.label: sum(run.view.process_seconds) for run in runs}
    names = [*dict.fromkeys(name for one in times.values() for name in one if name != OUTSIDE_TASKS), OUTSIDE_TASKS]
    longest = sorted(names, key=lambda name: -max(one.get(name, 0.0) for one in times.values()))[: len(COLOURS) - 1]
    rows = []
    for name in names:
        seconds = {label: one.get(name) for label, one in times.items()}
        cells = [
            MISSING if value is None or not whole[label] else f"{value:,.1f} s ({value / whole[label]:.1%})"
            for label, value in seconds.items()
        ]
        rows.append(("outside of committed tasks" if name == OUTSIDE_TASKS else name, *cells))
    bars = {
        label: [100 * one.get(name, 0.0) / total for name in names]
        for label, one in times.items()
        if (total := sum(one.values()))
    }
    rows.append(("time of all processes", *(_time_of_all(run) or MISSING for run in runs)))
    caption = "Where did the time go: the whole run with its start; tasks that run side by side both count"
    colours = [f"c{longest.index(name)}" if name in longest else "faint" for name in names]
    return Table(caption, ["task", *(run.label for run in runs)], rows, colours=colours, bars=bars)


def _time_of_all(run: RunData) -> str | None:
    processes = run.view.process_seconds
    return f"{sum(processes):,.1f} s, {count_text(len(processes), 'process')}" if processes else None


def difference_table(runs: Sequence[RunData]) -> Table:
    settings = [*map(run_settings, runs)]
    values = {key: [one.get(key, "absent") for one in settings] for one in settings for key in one}
    rows = [
        (key, "no" if key.partition(".")[0] in NON_NUMERIC_KEYS else "yes", *values[key])
        for key in values
        if len(set(values[key])) > 1
    ]
    return Table("Settings that differ", ["setting", "changes numbers", *(run.label for run in runs)], rows)


def settings_table(run: RunData) -> Table:
    return Table(f"Every setting of {run.label}", ["setting", "value"], [*run_settings(run).items()], is_folded=True)


def run_settings(run: RunData) -> dict[str, str]:
    """Dotted key -> value as JSON; of a configuration that this version cannot read, as it is in run.json."""
    config = run.view.config
    content: Mapping[str, Any] = run.view.description.config if config is None else public_dump(config)
    return {key: json.dumps(value) for key, value in leaves({**content, "steps": run.requested}).items()}
