"""Reports as HTML pages that need no network: the parts of a page, and the report of one or more trainings.

It is made from the folders of the trainings alone. `parity.page` makes that of a parity run from the same parts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fp8core.alignment.bounds import stored_bounds
from fp8core.config.layers import leaves
from fp8core.config.load import NON_NUMERIC_KEYS
from fp8core.config.run import RunConfig, public_dump
from fp8core.errors import printable_lines
from fp8core.report.chart import COLOURS, Chart, collapsed, counted, short
from fp8core.report.completions import LEGEND, Examples
from fp8core.report.console import format_tmpe
from fp8core.report.diagnosis import mean_shares
from fp8core.report.figures import Figure, chart_figure, iteration_figure, scale_figures, time_figures
from fp8core.report.head import head, mismatch, three
from fp8core.report.run_data import OUTSIDE_TASKS, RunData, time_spent
from fp8core.report.run_verdict import rollout_speed, token_mean
from fp8core.report.step_table import COLUMNS, step_rows
from fp8core.report.summary import MISSING, compared_tokens, edge_steps, first_steps, last_steps, precision_gap
from fp8core.report.training_charts import (
    ALIGNMENT,
    KV_CURVES,
    LEARNING,
    SIGNALS,
    WORST_TOKEN,
    Bounds,
    ahead_charts,
    configured_bounds,
    curve_chart,
    histories,
    token_charts,
)
from fp8core.store.diff import with_equal_steps
from fp8core.store.metrics import (
    ENTROPY,
    ESS,
    GAP,
    GAP_ACCURACY,
    GAP_BF16,
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
    TMPE,
    TOKENS,
    TOKENS_DIFFERING,
    series,
)

_TEMPLATE = "page.html.jinja"
EXAMPLE_RUNS = 2


@dataclass(frozen=True)
class Table:
    """Rows of text below a caption. A `folded` table is opened by its caption."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with words, figures, completions by run, and tables; `anchor` is its name in links."""

    anchor: str
    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = field(default_factory=tuple)
    heldout: Mapping[str, Examples] = field(default_factory=dict)
    examples: Mapping[str, Examples] = field(default_factory=dict)


def render_page(title: str, subtitle: str, answers: Sequence[str], sections: Sequence[Section]) -> str:
    """The page as HTML text, the answers on top; all text is escaped."""
    environment = Environment(
        loader=PackageLoader("fp8core.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template(_TEMPLATE)
    return template.render(
        title=title,
        subtitle=subtitle,
        answers=answers,
        sections=sections,
        script=Markup(get_plotlyjs()),
        colours=COLOURS,
        legend=LEGEND,
        short=short,
    )


def _shown(value: Any) -> Any:
    """A value as the page shows it: names and texts of others may hold characters that turn or hide what follows."""
    return printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


_DIGITS = 12


def number_rows(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, Callable[[RunData], str]]] = [
        ("state", lambda run: run.status),
        ("reward, mean of the first steps", _edge(first_steps)),
        ("reward, mean of the last steps", _edge(last_steps)),
        ("held-out accuracy, first", _over(HELDOUT, lambda values: values[0], three)),
        ("held-out accuracy, last", _over(HELDOUT, lambda values: values[-1], three)),
        ("held-out accuracy, best", _over(HELDOUT, max, three)),
        ("FP8 from BF16 at step 0, KL of prompts (nats per token)", _over(GAP_KL, lambda values: values[0])),
        ("FP8 from BF16 at step 0, same first choice, share of tokens", _over(GAP_SAME, lambda values: values[0])),
        ("FP8 from BF16 at step 0, log-prob of right answers (nats)", _over(GAP_SHIFT, lambda values: values[0])),
        ("FP8 from BF16 at step 0, sampled tokens (nats per token)", _over(GAP, lambda values: values[0])),
        ("held-out accuracy at step 0, prompts of both precisions", _over(GAP_ACCURACY, lambda values: values[0])),
        ("held-out accuracy at step 0, the same in BF16", _over(GAP_BF16, lambda values: values[0])),
        ("held-out accuracy at step 0, FP8 - BF16, paired, with 95 % interval", _gap_difference),
        ("completion length, last step (tokens)", _over(LENGTH, lambda values: values[-1])),
        ("entropy, last step (nats per token)", _over(ENTROPY, lambda values: values[-1])),
        ("token multiplicative probability error, mean", _by_token(TMPE, format_tmpe)),
        ("token multiplicative probability error, largest", _over(TMPE, max, format_tmpe)),
        ("k3 divergence, mean (nats)", _by_token(K3)),
        ("k3 divergence, largest (nats)", _over(K3, max)),
        ("effective sample size, smallest", _over(ESS, min, format_tmpe)),
        ("tokens whose log-probs differ", _over(TOKENS_DIFFERING, sum, lambda value: f"{value:,.0f}")),
        ("tokens whose log-probs were compared", lambda run: compared_tokens(run.history).words),
        *_ahead_rows(runs),
        ("outcomes of completions, mean of all steps", _outcomes),
        ("groups with a signal, mean", _over(SIGNAL, fmean)),
        ("steps in which no group had a signal", _over(SIGNAL, lambda values: values.count(0.0), "{:.0f}".format)),
        ("tokens generated", _over(TOKENS, sum, lambda value: f"{value:,.0f}")),
        ("tokens generated per second of rollout", _rollout_speed),
        (
            "median seconds of tasks a step",
            lambda run: short(median(run.busy.values())) if run.busy else MISSING,
        ),
        ("time of all processes", _time_of_all),
        ("bounds on alignment", _bounds),
        ("weights", _weights),
    ]
    return [(name, *(value(run) for run in runs)) for name, value in rows]


def _ahead_rows(runs: Sequence[RunData]) -> list[tuple[str, Callable[[RunData], str]]]:
    if not any(STALENESS in row for run in runs for row in run.history):
        return []
    return [
        ("staleness of tokens, mean (versions)", _over(STALENESS, fmean)),
        ("staleness of tokens, largest (versions)", _over(STALEST, max)),
        ("effective sample size against the writers of the tokens, smallest", _over(LAG_ESS, min)),
    ]


def numbers_table(runs: Sequence[RunData]) -> Table:
    return Table("What the runs came to", ["", *(run.label for run in runs)], number_rows(runs))


def steps_table(run: RunData) -> Table:
    return Table(f"{run.label}, step by step", COLUMNS, step_rows(run), folded=True)


def difference_table(runs: Sequence[RunData]) -> Table:
    configs = with_equal_steps([run.view.config for run in runs])
    settings = [run_settings(run, config) for run, config in zip(runs, configs, strict=True)]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    rows = [
        (key, "no" if key.partition(".")[0] in NON_NUMERIC_KEYS else "yes", *values)
        for key in keys
        if len(set(values := [one.get(key, "absent") for one in settings])) > 1
    ]
    return Table("Settings that differ", ["setting", "changes numbers", *(run.label for run in runs)], rows)


def settings_table(run: RunData) -> Table:
    settings = run_settings(run, run.view.config)
    return Table(f"Every setting of {run.label}", ["setting", "value"], list(settings.items()), folded=True)


def run_settings(run: RunData, config: RunConfig | None) -> dict[str, str]:
    """Dotted key -> value as JSON; of a configuration that this version cannot read, as it is in run.json."""
    content: Mapping[str, Any] = run.view.description.config if config is None else public_dump(config)
    settings = {key: json.dumps(value) for key, value in leaves({**content, "steps": run.asked}).items()}
    bounds = stored_bounds(config)
    return settings if bounds is None else settings | bounds.described()


def provenance_table(run: RunData) -> Table:
    return Table(run.label, ["", ""], run.provenance.lines(run.view))


def _time_of_all(run: RunData) -> str:
    processes = run.view.process_seconds
    if not processes:
        return MISSING
    return f"{sum(processes):,.1f} s, {counted(len(processes), 'process')}"


def task_time_table(runs: Sequence[RunData]) -> Table:
    def cell(run: RunData, name: str) -> str:
        if name not in run.seconds:
            return MISSING
        whole = sum(sum(values.values()) for values in run.seconds.values())
        return f"{fmean(run.seconds[name].values()):.3g} s ({sum(run.seconds[name].values()) / whole:.1%})"

    names = dict.fromkeys(name for run in runs for name in run.seconds)
    rows = [(name, *(cell(run, name) for run in runs)) for name in names]
    return Table("Mean seconds of a step, and share of all task time", ["task", *(run.label for run in runs)], rows)


def whole_time_table(runs: Sequence[RunData]) -> Table:
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
    rows.append(("time of all processes", *(_time_of_all(run) for run in runs)))
    caption = "Seconds of the whole run, its start included; tasks that run side by side both count"
    return Table(caption, ["task", *(run.label for run in runs)], rows)


def _bounds(run: RunData) -> str:
    bounds = stored_bounds(run.view.config)
    return MISSING if bounds is None else bounds.summary


def _over(
    metric: str, summary: Callable[[list[float]], float], form: Callable[[float], str] = short
) -> Callable[[RunData], str]:
    def value(run: RunData) -> str:
        _, values = series(run.history, metric)
        return form(summary(values)) if values else MISSING

    return value


def _by_token(metric: str, form: Callable[[float], str] = short) -> Callable[[RunData], str]:
    def value(run: RunData) -> str:
        mean = token_mean(run.history, metric)
        return MISSING if mean is None else form(mean)

    return value


def _edge(mean: Callable[[list[float]], float]) -> Callable[[RunData], str]:
    def value(run: RunData) -> str:
        _, values = series(run.history, REWARD)
        edge = edge_steps(len(values))
        return f"{three(mean(values))} ({counted(edge, 'step')})" if values else MISSING

    return value


def _outcomes(run: RunData) -> str:
    shares = mean_shares(run.history)
    return ", ".join(f"{share:.1%} {name}" for name, share in shares.items()) or MISSING


def _gap_difference(run: RunData) -> str:
    gap = precision_gap(run.history)
    return MISSING if gap is None else gap.difference_words


def _rollout_speed(run: RunData) -> str:
    speed = rollout_speed(run)
    return MISSING if speed is None else short(speed)


def _weights(run: RunData) -> str:
    steps = run.view.steps
    return steps[max(steps)].entry.weights_digest[:_DIGITS] if steps else MISSING


def report_html(runs: Sequence[RunData]) -> str:
    title = ", ".join(run.label for run in runs)
    states = "; ".join(f"{run.label}: {run.status}" for run in runs)
    gaps = sum(len(run.missing) for run in runs)
    note = f" {counted(gaps, 'note')} on what is missing, at the end." if gaps else ""
    answers = [words if len(runs) == 1 else f"{run.label}: {words}" for run in runs for words in head(run)]
    sections = run_sections(runs, configured_bounds(runs))
    return render_page(title, f"fp8-grpo report. {states}.{note}", answers, sections)


def run_sections(runs: Sequence[RunData], bounds: Bounds) -> list[Section]:
    lines = histories(runs)
    samples = [(run.label, run.tokens) for run in runs]
    scales = scale_figures(runs)
    scaled, constant = collapsed(curve_chart(curve, lines) for curve in KV_CURVES if scales)
    alignment = (curve_chart(curve, lines, bounds.get(curve.metric, ())) for curve in (*ALIGNMENT, WORST_TOKEN))
    ahead = ahead_charts(lines)
    return [
        charted("learning", "Learning", collapsed(curve_chart(curve, lines) for curve in (*LEARNING, *SIGNALS))),
        charted("alignment", "Alignment of rollout and training", collapsed(alignment), _mismatches(runs)),
        *([charted("ahead", "Generation ahead", collapsed(ahead))] if ahead else []),
        charted("tokens", "Mismatch by token", token_charts(samples)),
        _completions(runs),
        Section(
            "scales",
            "Scales of the KV cache",
            constant if scales else ["No run has scales: its KV cache is not in FP8."],
            [*map(chart_figure, scaled), *scales],
        ),
        Section("time", "Time", figures=time_figures(runs), tables=[task_time_table(runs), whole_time_table(runs)]),
        Section("graph", "Iteration", figures=[iteration_figure(run) for run in runs]),
        Section("numbers", "Numbers", tables=[numbers_table(runs), *map(steps_table, runs)]),
        _configuration(runs),
        Section("provenance", "Provenance", tables=[provenance_table(run) for run in runs]),
        _missing(runs),
    ]


def _mismatches(runs: Sequence[RunData]) -> list[str]:
    found = [(run.label, words) for run in runs if (words := mismatch(run)) is not None]
    return [words if len(runs) == 1 else f"{label}: {words}" for label, words in found]


def charted(anchor: str, title: str, charts: tuple[list[Chart], list[str]], words: Sequence[str] = ()) -> Section:
    drawn, told = charts
    return Section(anchor, title, [*words, *told], [*map(chart_figure, drawn)])


def _completions(runs: Sequence[RunData]) -> Section:
    shown = runs[:EXAMPLE_RUNS]
    heldout = {run.label: run.heldout for run in shown if run.heldout is not None}
    examples = {run.label: run.examples for run in shown if run.examples is not None}
    words = [] if heldout or examples else ["No step has completions that can be read."]
    if any(STALENESS in row for run in shown for row in run.history):
        words.append("Where a run generates ahead, the mismatch of a token includes its age.")
    return Section("completions", "Completions", words, heldout=heldout, examples=examples)


def _missing(runs: Sequence[RunData]) -> Section:
    rows = [(run.label, line) for run in runs for line in run.missing]
    if not rows:
        return Section("missing", "Missing", ["Nothing: all that the ledgers name could be read."])
    return Section("missing", "Missing", tables=[Table("What could not be read", ["run", "what"], rows)])


def _configuration(runs: Sequence[RunData]) -> Section:
    tables = [settings_table(run) for run in runs]
    if len(runs) > 1:
        tables.insert(0, difference_table(runs))
    return Section("configuration", "Configuration", tables=tables)
