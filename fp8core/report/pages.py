"""Reports as HTML pages that need no network: parts of a page, figures, tables, and the report of some trainings."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from operator import itemgetter
from statistics import fmean, median
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fp8core.alignment.bounds import stored_bounds
from fp8core.config.layers import leaves
from fp8core.config.load import NON_NUMERIC_KEYS
from fp8core.config.run import public_dump
from fp8core.errors import printable, printable_lines
from fp8core.metric import CurveSection, Summary
from fp8core.metrics.registry import METRICS
from fp8core.report.chart import (
    ALARM,
    COLOURS,
    MISSING,
    Chart,
    Collapse,
    Series,
    bound_lines,
    count_text,
    curve_chart,
    format_value,
    section_metrics,
    short,
    split_constant,
)
from fp8core.report.completions import LEGEND, Examples
from fp8core.report.conclusion import conclude, rollout_speed
from fp8core.report.diagnosis import mean_shares
from fp8core.report.run_data import OUTSIDE_TASKS, RunData, compared_tokens, first_steps, last_steps, time_spent
from fp8core.store.metrics import GAP, GAP_DIFFERENCE, GAP_HIGH, GAP_LOW, GAP_PROMPTS, History, series

_EXAMPLE_RUNS = 2
# So few steps have a tick each.
_FEW_STEPS = 8
# Colours are names of the page's CSS variables, which its script replaces, so that a page can be dark.
_DASHES = ("solid", "6px,3px", "2px,2px", "8px,3px,2px,3px", "12px,4px")


@dataclass(frozen=True)
class Figure:
    """A plotly figure with its title and a note, which the page writes above and below it."""

    title: str
    plot: go.Figure
    note: str = ""

    @property
    def json(self) -> Markup:
        """The figure as JSON that cannot end the script element around it, whatever the names in it are."""
        text: str = self.plot.to_json()
        return Markup(text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}))


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


@dataclass(frozen=True)
class Section:
    """A heading with words, figures, tables and completions (title, words, texts); `anchor` is its name in links."""

    anchor: str
    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    examples: Sequence[tuple[str, str, Examples]] = ()


def render_page(
    title: str, subtitle: str, alarms: Sequence[str], answers: Sequence[str], sections: Sequence[Section]
) -> str:
    """The page as HTML text, alarms and answers on top; all text is escaped."""
    environment = Environment(
        loader=PackageLoader("fp8core.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html.jinja")
    plotly = Markup(get_plotlyjs())
    page = {"title": title, "subtitle": subtitle, "alarms": alarms, "answers": answers, "sections": sections}
    return template.render(page, script=plotly, alarm=ALARM, colours=COLOURS, legend=LEGEND, short=short)


def _printable(value: Any) -> Any:
    """Names and texts of others may hold characters that turn or hide what follows."""
    return printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def report_html(runs: Sequence[RunData]) -> str:
    states = "; ".join(f"{run.label}: {run.status}" for run in runs)
    gaps = sum(len(run.missing) for run in runs)
    note = f" {count_text(gaps, 'note')} on what is missing, at the end." if gaps else ""
    alarms = list[str]()
    answers = list[str]()
    collapses = list[Collapse]()
    for run in runs:
        conclusion = conclude(run)
        whose = "" if len(runs) == 1 else f"{run.label}: "
        symptoms = [] if conclusion.diagnosis is None else [conclusion.diagnosis.symptom]
        alarms += [f"{whose}{words}" for words in symptoms]
        answers += [f"{whose}{words}" for words in conclusion.paragraphs if words not in symptoms]
        collapses += conclusion.collapses(f"{whose}collapse")
    title = ", ".join(run.label for run in runs)
    return render_page(title, f"fp8-grpo report. {states}.{note}", alarms, answers, _sections(runs, collapses))


def _sections(runs: Sequence[RunData], collapses: Sequence[Collapse]) -> list[Section]:
    """Sections without content are left out."""
    lines = [(run.label, run.history) for run in runs]
    bounds = bound_lines([(run.label, stored_bounds(run.view.config)) for run in runs])

    def curves(anchor: str, title: str, *sections: CurveSection) -> Section:
        metrics = [metric for section in sections for metric in section_metrics(section, [run.history for run in runs])]
        charts = (curve_chart(metric, lines, bounds.get(metric.name, ()), collapses) for metric in metrics)
        varying, constant = split_constant(charts)
        return Section(anchor, title, constant, [*map(chart_figure, varying)])

    missing = [(run.label, line) for run in runs for line in run.missing]
    unread = [Table("What could not be read", ["run", "what"], missing)] if missing else []
    provenance = [Table(f"Provenance of {run.label}", ["", ""], run.provenance.lines(run.view), True) for run in runs]
    settings = [*([difference_table(runs)] if len(runs) > 1 else []), *map(settings_table, runs)]
    sections = [
        curves("learning", "Learning", "learning", "signals"),
        curves("own", "Verifiers, environment and own steps", "own"),
        curves("alignment", "Alignment of rollout and training", "alignment", "ahead", "scales"),
        _completions(runs),
        Section("numbers", "Numbers and time", tables=[numbers_table(runs), time_table(runs)]),
        Section("configuration", "Configuration and provenance", tables=[*settings, *provenance]),
        Section("missing", "Missing", tables=unread),
    ]
    return [part for part in sections if part.text or part.figures or part.tables or part.examples]


def _completions(runs: Sequence[RunData]) -> Section:
    shown = list[tuple[str, str, Examples]]()
    for run in runs[:_EXAMPLE_RUNS]:
        if run.heldout:
            words = "The same prompts at the first and at the last evaluation, answered greedily."
            shown.append((f"{run.label}: held-out prompts", words, run.heldout))
        if run.examples:
            words = "Compared tokens are equal bit for bit under both policies, so none has a colour."
            if any(one.differing for one in run.examples):
                words = "Colours show |log p - log g| of a token; without one: equal bit for bit, or not compared."
            shown.append((f"{run.label}: prompts of the training, early and late", words, run.examples))
    return Section("completions", "Completions", examples=shown)


def chart_figure(chart: Chart) -> Figure:
    plot = _empty(chart.x_label, chart.y_label, [line.label for line in chart.series if len(chart.series) > 1])
    is_log = chart.y_scale == "log"
    lane, axis = _log_axis(chart) if is_log else (-math.inf, {})
    for line in chart.series:
        plot.add_trace(_trace(line, lane))
    included = [*chart.include]
    for number, bound in enumerate(chart.bounds):
        y = max(bound.y, lane)
        plot.add_hline(y, line={"color": "var(--faint)", "width": 1, "dash": "dot"})
        # Labels of two bounds may be close, so they are on different sides.
        side: dict[str, Any] = ({"x": 0.01, "xanchor": "left"}, {"x": 0.99, "xanchor": "right"})[number % 2]
        words: dict[str, Any] = {"text": _text(bound.label), "font_size": 10, "showarrow": False, "borderpad": 0}
        height = math.log10(y) if is_log else y
        plot.add_annotation(xref="x domain", y=height, yanchor="bottom", yshift=3, **side, **words)
        included += [y, 1.7 * y if is_log else y + 0.1 * abs(y)]
    for collapse in chart.collapses:
        words = {"annotation_text": _text(collapse.label), "annotation_font": {"size": 10, "color": "var(--alarm)"}}
        plot.add_vline(collapse.step, line={"color": "var(--alarm)", "width": 1.5, "dash": "dash"}, **words)
    reach = [*chart.values, *chart.include, *(bound.y for bound in chart.bounds)]
    if reach and not is_log:
        # Room for half a marker.
        room = 0.03 * (max(reach) - min(reach))
        included += [min(reach) - room, max(reach) + room]
    steps = {x for line in chart.series for x in line.x}
    if steps and max(steps) - min(steps) < _FEW_STEPS:
        plot.update_xaxes(dtick=1)
    plot.update_yaxes(autorangeoptions_include=included or None, **axis)
    return Figure(chart.title, plot, chart.note)


def _log_axis(chart: Chart) -> tuple[float, dict[str, Any]]:
    """Where values of zero or less are drawn, and a logarithmic axis whose lowest tick is labelled 0 where some are."""
    positive = [y for y in chart.values if y > 0] or [1.0]
    ends = [*positive, *(bound.y for bound in chart.bounds if bound.y > 0)]
    first = math.floor(math.log10(min(ends)))
    last = math.ceil(math.log10(max(ends)))
    stride = max(1, math.ceil((last - first) / 5))
    ticks = {10.0**power: short(10.0**power) for power in range(first, last + 1, stride)}
    lane = 10.0 ** (first - 0.6 * stride)
    if any(y <= 0 for y in chart.values):
        ticks = {lane: "0", **ticks}
    return lane, {"type": "log", "tickmode": "array", "tickvals": list(ticks), "ticktext": list(ticks.values())}


def _trace(line: Series, lane: float) -> go.Scatter:
    points = line.finite()
    style = line.style
    dash = _DASHES[style % len(_DASHES)]
    marker = {"size": 6, "maxdisplayed": 10 if len(points) > 40 else 0}
    look: dict[str, Any] = {"mode": "lines+markers", "marker": marker, "line": {"dash": dash, "width": 1.5}}
    x = [x for x, _ in points]
    y = [y for _, y in points]
    look |= {"hovertemplate": "%{customdata}", "customdata": [*map(short, y)]}
    trace = go.Scatter(name=_text(line.label), x=x, y=[max(value, lane) for value in y], **look)
    return trace.update(line_color=_ink(style), marker_color=_ink(style))


def _empty(x_label: str, y_label: str, labels: Sequence[str]) -> go.Figure:
    """A figure without traces; its height has room for a legend of these labels."""
    legend = 19 * -(-len(labels) // max(1, int(330 // (6.3 * max(map(len, labels), default=0) + 48))))
    font = {"family": "system-ui, sans-serif", "size": 11, "color": "var(--ink)"}
    axis: dict[str, Any] = {"automargin": True, "gridcolor": "var(--grid)", "linecolor": "var(--faint)", "ticks": ""}
    axis |= {"nticks": 8, "showline": True, "zeroline": False, "title_font_size": 11, "title_standoff": 6}
    axis |= {"spikecolor": "var(--faint)", "spikedash": "solid", "spikethickness": 1}
    plot = go.Figure()
    plot.update_layout(
        template=None,
        font=font,
        height=246 + legend,
        margin={"l": 58, "r": 10, "t": 8 + legend, "b": 38},
        paper_bgcolor="var(--paper)",
        plot_bgcolor="var(--paper)",
        modebar={"bgcolor": "var(--paper)", "color": "var(--faint)", "activecolor": "var(--ink)"},
        hovermode="x unified",
        hoverlabel={"bgcolor": "var(--paper)", "bordercolor": "var(--faint)", "font": font, "namelength": -1},
        showlegend=bool(labels),
        legend={"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top", "traceorder": "normal"},
        xaxis={**axis, "title_text": x_label, "unifiedhovertitle": {"text": f"{x_label} %{{x:.4~g}}"}},
        yaxis={**axis, "title_text": y_label, "showspikes": False},
    )
    return plot


def _text(text: str) -> str:
    """Text of others as plotly takes it, which has markup of its own."""
    return escape(printable(text), quote=False)


def _ink(style: int) -> str:
    return f"var(--c{style % len(COLOURS)})"


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
