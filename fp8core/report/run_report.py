"""The report of one or more trainings as one HTML page, from their folders alone: no network, no script."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fp8core.alignment.bounds import stop_bounds
from fp8core.config.load import NON_NUMERIC_KEYS, leaves
from fp8core.config.run import public_dump
from fp8core.errors import printable_lines
from fp8core.report.charts import Chart, short
from fp8core.report.console import format_tmpe
from fp8core.report.drawing import svg
from fp8core.report.run_charts import (
    ALIGNMENT,
    ESS,
    K3,
    KV_CURVES,
    LEARNING,
    WORST_TOKEN,
    Bounds,
    configured_bounds,
    curve_chart,
    difference_by_position,
    difference_histogram,
    histories,
    logprob_scatter,
    pipeline_graph,
    scale_heatmap,
    time_shares,
    time_stack,
)
from fp8core.report.run_data import RunData
from fp8core.report.summary import EDGE_STEPS, ENTROPY, HELDOUT, LENGTH, MISSING, REWARD, TMPE, TOKENS_DIFFERING, series
from fp8core.store.output import PAGE_MARK

_TEMPLATE = "page.html.jinja"


@dataclass(frozen=True)
class Table:
    """Rows of text below a caption. A `folded` table is opened by its caption."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with words, figures (SVG text) and tables below it; `anchor` is its name in links."""

    anchor: str
    title: str
    text: Sequence[str] = ()
    figures: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=tuple)


def render_page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page as HTML text; everything but the figures is escaped."""
    environment = Environment(
        loader=PackageLoader("fp8core.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template(_TEMPLATE)
    return template.render(mark=Markup(PAGE_MARK), title=title, subtitle=subtitle, sections=sections, figure=Markup)


def _shown(value: Any) -> Any:
    """A value as the page shows it: names and texts of others may hold characters that turn or hide what follows."""
    return type(value)(printable_lines(value)) if isinstance(value, str) else value


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
        ("bounds on alignment", _bounds),
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
        (key, "no" if key.partition(".")[0] in NON_NUMERIC_KEYS else "yes", *values)
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
    settings = {key: json.dumps(value) for key, value in leaves(content).items()}
    return settings if config is None else settings | stop_bounds(config).described()


def provenance_table(run: RunData) -> Table:
    """Folder, processes, code, machine and libraries of a run."""
    return Table(run.label, ["", ""], run.provenance.lines(run.evidence))


def _bounds(run: RunData) -> str:
    return MISSING if run.evidence.config is None else stop_bounds(run.evidence.config).summary


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


def report_html(runs: Sequence[RunData]) -> str:
    """The page, with the bounds that the runs are configured to stop at."""
    title = ", ".join(run.label for run in runs)
    states = "; ".join(f"{run.label}: {run.status}" for run in runs)
    gaps = sum(len(run.missing) for run in runs)
    note = f" {gaps} notes on what is missing are at the end." if gaps else ""
    return render_page(title, f"fp8-grpo report. {states}.{note}", run_sections(runs, configured_bounds(runs)))


def run_sections(runs: Sequence[RunData], bounds: Bounds) -> list[Section]:
    """Every section of the page, whatever is missing."""
    lines = histories(runs)
    samples = [(run.label, run.tokens) for run in runs]
    scales = [scale_heatmap(run.label, run.history) for run in runs]
    scaled = [svg(heatmap) for heatmap in scales if heatmap.x]
    tokens = (difference_histogram(samples), logprob_scatter(samples), difference_by_position(samples))
    shares = Table(
        "Mean seconds of a step, and share of all task time",
        ["task", *(run.label for run in runs)],
        time_shares(runs),
    )
    return [
        Section("numbers", "Numbers", tables=[numbers_table(runs)]),
        Section("learning", "Learning", figures=_svgs(curve_chart(curve, lines) for curve in LEARNING)),
        Section(
            "alignment",
            "Alignment of rollout and training",
            figures=_svgs(
                curve_chart(curve, lines, bounds.get(curve.metric, ())) for curve in (*ALIGNMENT, WORST_TOKEN)
            ),
        ),
        Section("tokens", "Mismatch by token", figures=_svgs(tokens)),
        Section(
            "scales",
            "Scales of the KV cache",
            [] if scaled else ["No run has scales: its KV cache is not in FP8."],
            [*_svgs(curve_chart(curve, lines) for curve in KV_CURVES), *scaled],
        ),
        Section("time", "Time", figures=[svg(time_stack(run)) for run in runs], tables=[shares]),
        Section("graph", "Iteration", figures=[svg(pipeline_graph(run)) for run in runs]),
        _configuration(runs),
        Section("provenance", "Provenance", tables=[provenance_table(run) for run in runs]),
        _missing(runs),
    ]


def key_charts(runs: Sequence[RunData]) -> list[Chart]:
    """The few charts that a picture shows."""
    bounds = configured_bounds(runs)
    chosen = (*LEARNING[:4], *ALIGNMENT[:2])
    return [curve_chart(curve, histories(runs), bounds.get(curve.metric, ())) for curve in chosen]


def _svgs(charts: Iterable[Chart]) -> list[str]:
    return [svg(chart) for chart in charts]


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
