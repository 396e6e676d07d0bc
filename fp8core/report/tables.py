"""The tables of a report: numbers of runs, every step, time by task, settings and provenance."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from fp8core.alignment.bounds import stored_bounds
from fp8core.config.layers import leaves
from fp8core.config.load import NON_NUMERIC_KEYS
from fp8core.config.run import RunConfig, public_dump
from fp8core.report.chart import MISSING, counted, format_tmpe, short, three_decimals
from fp8core.report.diagnosis import mean_shares
from fp8core.report.run_data import OUTSIDE_TASKS, RunData, time_spent
from fp8core.report.run_verdict import rollout_speed, token_mean
from fp8core.report.summary import compared_tokens, edge_steps, first_steps, last_steps, precision_gap
from fp8core.store.diff import without_steps_of_modes
from fp8core.store.ledger import BoundEntry, CheckpointEntry
from fp8core.store.metrics import (
    ENTROPY,
    ESS,
    GAP_KL,
    GAP_SAME,
    GAP_SHIFT,
    HELDOUT,
    K3,
    LAG_ESS,
    LENGTH,
    REWARD,
    SIGNAL,
    STALENESS,
    STALEST,
    STEP,
    TMPE,
    TOKENS,
    TOKENS_DIFFERING,
    series,
)

_first, _last = itemgetter(0), itemgetter(-1)


@dataclass(frozen=True)
class Table:
    """Rows of text below a caption. A `folded` table is opened by its caption."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


def numbers_table(runs: Sequence[RunData]) -> Table:
    """Every number that a run has, a column a run."""
    numbers = [_numbers(run) for run in runs]
    rows = [
        (name, *(one[name] or MISSING for one in numbers)) for name in numbers[0] if any(one[name] for one in numbers)
    ]
    return Table("What the runs came to", ["", *(run.label for run in runs)], rows)


def _numbers(run: RunData) -> dict[str, str | None]:
    def over(
        metric: str, summary: Callable[[Sequence[float]], float], form: Callable[[float], str] = short
    ) -> str | None:
        _, values = series(run.history, metric)
        return form(summary(values)) if values else None

    def by_token(metric: str, form: Callable[[float], str]) -> str | None:
        mean = token_mean(run.history, metric)
        return None if mean is None else form(mean)

    def whole(value: float) -> str:
        return f"{value:,.0f}"

    gap = precision_gap(run.history)
    speed = rollout_speed(run)
    steps = run.view.steps
    bounds = stored_bounds(run.view.config)
    edge = f" ({counted(edge_steps(len(series(run.history, REWARD)[1])), 'step')})"
    return {
        "state": run.status,
        "reward, mean of the first steps": over(REWARD, first_steps, lambda value: three_decimals(value) + edge),
        "reward, mean of the last steps": over(REWARD, last_steps, lambda value: three_decimals(value) + edge),
        "held-out accuracy, first": over(HELDOUT, _first, three_decimals),
        "held-out accuracy, last": over(HELDOUT, _last, three_decimals),
        "held-out accuracy, best": over(HELDOUT, max, three_decimals),
        "FP8 from BF16 at step 0, KL of prompts (nats per token)": over(GAP_KL, _first),
        "FP8 from BF16 at step 0, same first choice, share of tokens": over(GAP_SAME, _first),
        "FP8 from BF16 at step 0, log-prob of right answers (nats)": over(GAP_SHIFT, _first),
        "FP8 from BF16 at step 0, held-out accuracy, with 95 % interval": None if gap is None else gap.difference_words,
        "completion length, last step (tokens)": over(LENGTH, _last),
        "entropy, last step (nats per token)": over(ENTROPY, _last),
        "token multiplicative probability error, mean": by_token(TMPE, format_tmpe),
        "token multiplicative probability error, largest": over(TMPE, max, format_tmpe),
        "k3 divergence, mean (nats)": by_token(K3, short),
        "k3 divergence, largest (nats)": over(K3, max),
        "effective sample size, smallest": over(ESS, min, format_tmpe),
        "tokens whose log-probs differ": over(TOKENS_DIFFERING, sum, whole),
        "tokens whose log-probs were compared": compared_tokens(run.history).words,
        "staleness of tokens, mean (versions)": over(STALENESS, fmean),
        "staleness of tokens, largest (versions)": over(STALEST, max),
        "effective sample size against the writers of the tokens, smallest": over(LAG_ESS, min),
        "outcomes of completions, mean of all steps": ", ".join(
            f"{share:.1%} {name}" for name, share in mean_shares(run.history).items()
        ),
        "groups with a signal, mean": over(SIGNAL, fmean),
        "steps in which no group had a signal": over(SIGNAL, lambda values: values.count(0.0), whole),
        "tokens generated": over(TOKENS, sum, whole),
        "tokens generated per second of rollout": None if speed is None else short(speed),
        "median seconds of tasks a step": short(median(run.busy.values())) if run.busy else None,
        "time of all processes": _time_of_all(run),
        "bounds on alignment": None if bounds is None else bounds.summary,
        "weights": steps[max(steps)].entry.weights_digest[:12] if steps else None,
    }


def steps_table(run: RunData) -> Table:
    events = defaultdict[int, list[str]](list)
    for _, entry in run.view.entries:
        if isinstance(entry, CheckpointEntry):
            events[entry.step].append("checkpoint")
        elif isinstance(entry, BoundEntry):
            events[entry.step].append(f"{entry.reason}; {entry.action}")
    rows = []
    for row in run.history:
        step = int(row[STEP])
        numbers = [short(row[name]) if name in row else MISSING for name in (REWARD, HELDOUT)]
        error = format_tmpe(row[TMPE]) if TMPE in row else MISSING
        signal = f"{row[SIGNAL]:.0%}" if SIGNAL in row else MISSING
        seconds = short(run.busy[step]) if step in run.busy else MISSING
        rows.append((str(step), *numbers, error, signal, seconds, ", ".join(events.get(step, []))))
    columns = ("step", "reward", "held-out", "error a token", "groups with a signal", "seconds of tasks", "event")
    return Table(f"{run.label}, step by step", columns, rows, folded=True)


def time_table(runs: Sequence[RunData]) -> Table:
    """Seconds of the start's tasks, of every task over all steps, and of the rest, with their share of the whole."""
    spent = [time_spent(run.view) for run in runs]
    names = [*dict.fromkeys(name for one in spent for name in one if name != OUTSIDE_TASKS), OUTSIDE_TASKS]

    def cell(run: RunData, seconds: float | None) -> str:
        whole = sum(run.view.process_seconds)
        return MISSING if seconds is None or not whole else f"{seconds:,.1f} s ({seconds / whole:.1%})"

    rows = []
    for name in names:
        cells = [cell(run, one.get(name)) for run, one in zip(runs, spent, strict=True)]
        rows.append(("outside of committed tasks" if name == OUTSIDE_TASKS else name, *cells))
    rows.append(("time of all processes", *(_time_of_all(run) or MISSING for run in runs)))
    caption = "Seconds of the whole run, its start included; tasks that run side by side both count"
    return Table(caption, ["task", *(run.label for run in runs)], rows)


def _time_of_all(run: RunData) -> str | None:
    processes = run.view.process_seconds
    return f"{sum(processes):,.1f} s, {counted(len(processes), 'process')}" if processes else None


def difference_table(runs: Sequence[RunData]) -> Table:
    settings = [run_settings(run, run.view.config) for run in runs]
    values = {key: [one.get(key, "absent") for one in settings] for one in settings for key in one}
    rows = [
        (key, "no" if key.partition(".")[0] in NON_NUMERIC_KEYS else "yes", *values[key])
        for key in without_steps_of_modes([key for key in values if len(set(values[key])) > 1])
    ]
    return Table("Settings that differ", ["setting", "changes numbers", *(run.label for run in runs)], rows)


def settings_table(run: RunData) -> Table:
    settings = run_settings(run, run.view.config)
    return Table(f"Every setting of {run.label}", ["setting", "value"], list(settings.items()), folded=True)


def run_settings(run: RunData, config: RunConfig | None) -> dict[str, str]:
    """Dotted key -> value as JSON; of a configuration that this version cannot read, as it is in run.json."""
    content: Mapping[str, Any] = run.view.description.config if config is None else public_dump(config)
    settings = {key: json.dumps(value) for key, value in leaves({**content, "steps": run.requested}).items()}
    bounds = stored_bounds(config)
    return settings if bounds is None else settings | bounds.described()
