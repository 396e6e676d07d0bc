"""Reports as HTML pages that need no network: the parts of a page, and the report of one or more trainings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fp8core.alignment.bounds import stored_bounds
from fp8core.errors import printable, printable_lines
from fp8core.metric import Metric
from fp8core.report.chart import COLOURS, Chart, Series, collapsed, counted, short
from fp8core.report.completions import LEGEND, Examples
from fp8core.report.conclusion import conclude
from fp8core.report.run_data import RunData
from fp8core.report.tables import Table, difference_table, numbers_table, settings_table, time_table
from fp8core.report.training_charts import bound_lines, curve_chart, section_metrics, token_charts

_EXAMPLE_RUNS = 2
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


def render_page(title: str, subtitle: str, answers: Sequence[str], sections: Sequence[Section]) -> str:
    """The page as HTML text, the answers on top; all text is escaped."""
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
    page = {"title": title, "subtitle": subtitle, "answers": answers, "sections": sections}
    return template.render(page, script=plotly, colours=COLOURS, legend=LEGEND, short=short)


def _printable(value: Any) -> Any:
    """Names and texts of others may hold characters that turn or hide what follows."""
    return printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def report_html(runs: Sequence[RunData]) -> str:
    title = ", ".join(run.label for run in runs)
    states = "; ".join(f"{run.label}: {run.status}" for run in runs)
    gaps = sum(len(run.missing) for run in runs)
    note = f" {counted(gaps, 'note')} on what is missing, at the end." if gaps else ""
    answers = [
        words if len(runs) == 1 else f"{run.label}: {words}" for run in runs for words in conclude(run).paragraphs
    ]
    return render_page(title, f"fp8-grpo report. {states}.{note}", answers, _sections(runs))


def _sections(runs: Sequence[RunData]) -> list[Section]:
    lines = [(run.label, run.history) for run in runs]
    bounds = bound_lines([(run.label, stored_bounds(run.view.config)) for run in runs])

    def curves(anchor: str, title: str, metrics: Sequence[Metric]) -> Section:
        charts = (curve_chart(metric, lines, bounds.get(metric.name, ())) for metric in metrics)
        return charted(anchor, title, collapsed(charts))

    def optional(anchor: Literal["ahead", "scales", "own"], title: str) -> list[Section]:
        """Without a value of its first metric there is no such section."""
        metrics = section_metrics(anchor, [run.history for run in runs])
        measured = any(metrics[0].values(row) for _, history in lines for row in history) if metrics else False
        return [curves(anchor, title, metrics)] if measured else []

    missing = [(run.label, line) for run in runs for line in run.missing]
    provenance = [Table(run.label, ["", ""], run.provenance.lines(run.view)) for run in runs]
    settings = [*([difference_table(runs)] if len(runs) > 1 else []), *map(settings_table, runs)]
    return [
        curves("learning", "Learning", [*section_metrics("learning"), *section_metrics("signals")]),
        curves("alignment", "Alignment of rollout and training", section_metrics("alignment")),
        *optional("ahead", "Generation ahead"),
        charted("tokens", "Mismatch by token", token_charts([(run.label, run.tokens) for run in runs])),
        _completions(runs),
        *optional("scales", "Scales of the KV cache"),
        *optional("own", "Metrics of own steps"),
        Section("numbers", "Numbers", tables=[numbers_table(runs), time_table(runs)]),
        Section("configuration", "Configuration", tables=settings),
        Section("provenance", "Provenance", tables=provenance),
        Section(
            "missing",
            "Missing",
            [] if missing else ["Nothing: all that the ledgers name could be read."],
            tables=[Table("What could not be read", ["run", "what"], missing)] if missing else [],
        ),
    ]


def charted(anchor: str, title: str, charts: tuple[list[Chart], list[str]], words: Sequence[str] = ()) -> Section:
    drawn, told = charts
    return Section(anchor, title, [*words, *told], [*map(chart_figure, drawn)])


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
    return Section("completions", "Completions", [] if shown else ["No step has completions."], examples=shown)


def chart_figure(chart: Chart) -> Figure:
    plot = _empty(chart.x_label, chart.y_label, [series.label for series in chart.series])
    is_log = chart.y_scale == "log"
    lane, axis = _log_axis(chart) if is_log else (-math.inf, {})
    for series in chart.series:
        plot.add_trace(_trace(series, lane))
    included = [*chart.include]
    if len(included) > 1:
        # Room for half a marker.
        included += [included[0] - 0.03, included[-1] + 0.03]
    for bound in chart.bounds:
        y = max(bound.y, lane)
        line = {"color": "var(--faint)", "width": 1, "dash": "dot"}
        plot.add_shape(x0=0, x1=1, xref="x domain", y0=y, y1=y, line=line)
        words: dict[str, Any] = {"text": _text(bound.label), "font_size": 10, "showarrow": False, "borderpad": 0}
        height = math.log10(y) if is_log else y
        plot.add_annotation(x=0.01, xref="x domain", xanchor="left", y=height, yanchor="bottom", **words)
        included += [y, 1.7 * y if is_log else y + 0.1 * abs(y)]
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
    look: dict[str, Any]
    if series.mark == "outline":
        look = {"mode": "lines", "line": {"dash": dash, "width": 1.5, "shape": "hv"}}
    else:
        marker = {"size": 6, "maxdisplayed": 10 if len(points) > 40 else 0}
        look = {"mode": "lines+markers", "marker": marker, "line": {"dash": dash, "width": 1.5}}
    x = [x for x, _ in points]
    y = [y for _, y in points]
    look = {"hovertemplate": "%{customdata}", "customdata": [*map(short, y)], **look}
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
