"""Reports as HTML pages that need no network: the parts of a page, and the report of one or more trainings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fp8core.alignment.bounds import stored_bounds
from fp8core.errors import printable, printable_lines
from fp8core.metric import CurveSection
from fp8core.report.chart import ALARM, COLOURS, Chart, Collapse, Series, count_text, short, split_constant
from fp8core.report.completions import LEGEND, Examples
from fp8core.report.conclusion import conclude
from fp8core.report.run_data import RunData
from fp8core.report.tables import Table, difference_table, numbers_table, settings_table, time_table
from fp8core.report.training_charts import bound_lines, curve_chart, section_metrics

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
    plot = _empty(chart.x_label, chart.y_label, [series.label for series in chart.series if len(chart.series) > 1])
    is_log = chart.y_scale == "log"
    lane, axis = _log_axis(chart) if is_log else (-math.inf, {})
    for series in chart.series:
        plot.add_trace(_trace(series, lane))
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
    steps = {x for series in chart.series for x in series.x}
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


def _trace(series: Series, lane: float) -> go.Scatter:
    points = series.finite()
    style = series.style
    dash = _DASHES[style % len(_DASHES)]
    marker = {"size": 6, "maxdisplayed": 10 if len(points) > 40 else 0}
    look: dict[str, Any] = {"mode": "lines+markers", "marker": marker, "line": {"dash": dash, "width": 1.5}}
    x = [x for x, _ in points]
    y = [y for _, y in points]
    look |= {"hovertemplate": "%{customdata}", "customdata": [*map(short, y)]}
    trace = go.Scatter(name=_text(series.label), x=x, y=[max(value, lane) for value in y], **look)
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
