"""The figures of a page, by plotly: charts, time by task, scales of the KV cache, and the graph of an iteration.

Colours are names of the page's CSS variables, which its script replaces, so that a page can be dark.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from html import escape
from statistics import fmean
from typing import Any

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.subplots import make_subplots

from fp8core.errors import printable
from fp8core.report.chart import COLOURS, REFERENCE, Chart, Series, short
from fp8core.report.run_data import PipelineStep, RunData
from fp8core.store.metrics import STEP

_BARS, _CELLS = 120, 2000
_DASHES = ("solid", "6px,3px", "2px,2px", "8px,3px,2px,3px", "12px,4px")
# One more than dashes, so that 30 styles differ in one of them.
_MARKERS = ("circle", "diamond", "square", "triangle-up", "x", "triangle-down")
_PATTERNS = ("", "/", "|", "+")
_PALE_TO_DARK = ((0.0, "rgb(252, 232, 161)"), (1.0, "rgb(8, 28, 89)"))
# Of the graph, in pixels.
_BOX, _BOX_HEIGHT, _COLUMN, _ROW = 108, 46, 136, 62


@dataclass(frozen=True)
class Figure:
    """A plotly figure with its title and a note, which the page writes above and below it.

    It is as wide as its place on the page, but not narrower than `least_width` pixels.
    """

    title: str
    plot: go.Figure
    note: str = ""
    least_width: int = 0

    @property
    def json(self) -> Markup:
        """The figure as JSON that cannot end the script element around it, whatever the names in it are."""
        text: str = self.plot.to_json()
        return Markup(text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}))


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
    if any(series.mark == "dots" for series in chart.series):
        plot.update_layout(hovermode="closest")
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
    points, style = series.finite(), series.style
    dash = _DASHES[style % len(_DASHES)]
    look: dict[str, Any]
    if style == REFERENCE:
        look = {"mode": "lines", "line": {"dash": "dash", "width": 1}, "hoverinfo": "skip"}
    elif series.mark == "dots":
        look = {"mode": "markers", "marker": {"size": 5, "opacity": 0.6}, "hovertemplate": "%{x:.4g}, %{customdata}"}
    elif series.mark == "outline":
        look = {"mode": "lines", "line": {"dash": dash, "width": 1.5, "shape": "hv"}}
    else:
        marker = {"size": 6, "symbol": _MARKERS[style % len(_MARKERS)], "maxdisplayed": 10 if len(points) > 40 else 0}
        look = {"mode": "lines+markers", "marker": marker, "line": {"dash": dash, "width": 1.5}}
    x, y = [x for x, _ in points], [y for _, y in points]
    look = {"hovertemplate": "%{customdata}", "customdata": [*map(short, y)], **look}
    trace = go.Scatter(name=_text(series.label), x=x, y=[max(value, lane) for value in y], **look)
    return trace.update(line_color=_ink(style), marker_color=_ink(style))


def time_figures(runs: Sequence[RunData]) -> list[Figure]:
    """Seconds of each task over the steps of each run, with equal axes and one colour a task; as bars, 120 at most."""
    whole = Counter[str]()
    for run in runs:
        whole.update({name: sum(by_step.values()) for name, by_step in run.seconds.items()})
    names = [name for name, _ in whole.most_common()]
    figures = [_time_figure(run, names) for run in runs if run.seconds]
    ends = [max(max(bar.x) + bar.width[0] / 2 for bar in one.plot.data) for one in figures]
    heights = [sum(layers) for one in figures for layers in zip(*(bar.y for bar in one.plot.data), strict=True)]
    for one in figures:
        one.plot.update_layout(xaxis_range=[0.5, max(ends)], yaxis_range=[0, 1.04 * max(heights)])
    return figures


def _time_figure(run: RunData, names: Sequence[str]) -> Figure:
    steps = sorted({step for by_step in run.seconds.values() for step in by_step})
    plot = _empty("step", "seconds", list(run.seconds))
    bars = min(_BARS, len(steps))
    widths = [(steps[-1] - steps[0] + 1) / bars] * bars
    heights = {name: _means([by.get(step, 0.0) for step in steps], bars) for name, by in run.seconds.items()}
    sums = [math.fsum(parts) or 1.0 for parts in zip(*heights.values(), strict=True)]
    for name, y in heights.items():
        style = names.index(name)
        shape = _PATTERNS[style // len(COLOURS) % len(_PATTERNS)]
        pattern = {"shape": shape, "size": 5, "fgcolor": "var(--paper)", "fillmode": "overlay"}
        marker = {"color": _ink(style), "pattern": pattern, "line": {"width": 0.5, "color": "var(--paper)"}}
        shares = [f"{short(part)} ({part / whole:.0%})" for part, whole in zip(y, sums, strict=True)]
        bar = go.Bar(name=_text(name), x=_means(steps, bars), y=y, width=widths, marker=marker, customdata=shares)
        plot.add_trace(bar.update(hovertemplate="%{customdata}"))
    plot.update_layout(barmode="stack", bargap=0)
    return Figure(f"Time by task: {run.label}", plot)


def scale_figures(runs: Sequence[RunData]) -> list[Figure]:
    """The scales of Q, K and V by layer and step of each run that has them, with equal axes and colours."""
    rows = {run.label: [row for row in run.history if "kv/scale_q_layer0" in row] for run in runs}
    rows = {label: some for label, some in rows.items() if some}
    scales = [row[name] for some in rows.values() for row in some for name in row if name.startswith("kv/scale_")]
    positive = [value for value in scales if math.isfinite(value) and value > 0]
    if not positive:
        return []
    last = max(some[-1][STEP] for some in rows.values())
    return [_scale_figure(label, some, (min(positive), max(positive)), last) for label, some in rows.items()]


def _scale_figure(label: str, rows: Sequence[Mapping[str, float]], ends: tuple[float, float], last: float) -> Figure:
    layers = sum(name.startswith("kv/scale_q_layer") for name in rows[0])
    panels = ("queries", "keys", "values")
    plot = _empty("", "", [])
    make_subplots(3, 1, shared_xaxes=True, vertical_spacing=0.16, subplot_titles=panels, figure=plot)
    columns = min(len(rows), max(12, _CELLS // (3 * layers)))
    for place, panel in enumerate(panels, 1):
        names = [f"kv/scale_{panel[0]}_layer{layer}" for layer in range(layers)]
        scales = [_means([row.get(name, math.nan) for row in rows], columns) for name in names]
        plot.add_heatmap(
            x=_means([row[STEP] for row in rows], columns),
            z=[[math.log10(value) if value > 0 else None for value in values] for values in scales],
            customdata=[[*map(short, values)] for values in scales],
            hovertemplate=f"{panel}, layer %{{y}}, step %{{x:.0f}}: %{{customdata}}<extra></extra>",
            coloraxis="coloraxis",
            row=place,
            col=1,
        )
    inside = 3 * max(24, layers * (12 if layers <= 8 else 5)) + 56
    low, high = ends
    ticks = sorted({low, high})
    bar = {"orientation": "h", "thickness": 10, "len": 0.5, "x": 0.5, "y": -48 / inside, "yanchor": "top"}
    bar |= {"title": {"text": "scale", "side": "right", "font": {"size": 11}}}
    bar |= {"tickvals": [*map(math.log10, ticks)], "ticktext": [*map(short, ticks)]}
    shade = 0.15 if low == high else 0.0
    shades = {"cmin": math.log10(low) - shade, "cmax": math.log10(high) + shade, "colorscale": _PALE_TO_DARK}
    plot.update_layout(coloraxis={**shades, "colorbar": bar}, hovermode="closest", xaxis_showticklabels=False)
    plot.update_layout(height=inside + 114, margin={"t": 24, "b": 90})
    plot.update_annotations(x=0, xanchor="left", font_size=11)
    axis = {"showline": False, "showgrid": False, "zeroline": False, "title_font_size": 11, "title_standoff": 6}
    plot.update_yaxes(title_text="layer", autorange="reversed", tickmode="auto", nticks=4, tickformat="d", **axis)
    plot.update_xaxes(range=[rows[0][STEP] - 0.5, last + 0.5], nticks=8, **axis)
    plot.update_xaxes(title_text="step", row=3)
    return Figure(f"Scales of Q, K and V: {label}", plot)


def iteration_figure(run: RunData) -> Figure:
    """The steps of an iteration as boxes in columns, shaded by their share of the time, and the artifacts between."""
    columns, arrows = _columns(run.pipeline)
    tallest = max(map(len, columns), default=1)
    places = {
        name: (12 + _COLUMN * column, _ROW * (i + (tallest - len(names)) / 2 + 0.5))
        for column, names in enumerate(columns)
        for i, name in enumerate(names)
    }
    plot = _empty("", "", [])
    line = {"color": "var(--ink)", "width": 1}
    for source, target in arrows:
        x0, y0, (x1, y1) = places[source][0] + _BOX, places[source][1], places[target]
        bend = (x0 + x1) / 2
        plot.add_shape(type="path", path=f"M {x0},{y0} C {bend},{y0} {bend},{y1} {x1 - 2},{y1}", line=line)
        head = {"x": x1, "y": y1, "ax": x1 - 6, "ay": y1, "axref": "x", "ayref": "y", "arrowhead": 2, "arrowsize": 1.2}
        plot.add_annotation(text="", arrowwidth=1, arrowcolor="var(--ink)", **head)
    whole = sum(sum(by.values()) for by in run.seconds.values()) or 1.0
    for name, (x, y) in places.items():
        seconds = run.seconds.get(name, {}).values()
        share = sum(seconds) / whole
        text = f"{fmean(seconds):.3g} s, {share:.0%}" if seconds else "not measured"
        label = {"text": f"<b>{_text(name)}</b><br>{text}", "font": {"size": 11}}
        corners = {"x0": x, "x1": x + _BOX, "y0": y - _BOX_HEIGHT / 2, "y1": y + _BOX_HEIGHT / 2}
        plot.add_shape(**corners, line=line, fillcolor=f"rgba(0, 114, 178, {0.45 * share:.3f})", label=label)
    width = 12 + len(columns) * _COLUMN
    plot.update_layout(height=tallest * _ROW + 12, margin={"l": 0, "r": 0, "t": 6, "b": 6})
    plot.update_xaxes(visible=False, range=[0, width], fixedrange=True)
    plot.update_yaxes(visible=False, range=[tallest * _ROW, 0], fixedrange=True)
    note = "Mean seconds of a step and share of all task time. An arrow that a longer path implies is left out."
    return Figure(f"One iteration: {run.label}", plot, note, width)


def _columns(pipeline: Sequence[PipelineStep]) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Steps by column, each right of the last one it waits for, and the pairs that no longer path connects."""
    before = {step.name: {s.name for s in pipeline if {*s.provides} & {*step.reads}} for step in pipeline}
    sorter = TopologicalSorter(before)
    sorter.prepare()
    columns = list[list[str]]()
    ancestors = dict[str, set[str]]()
    while sorter.is_active():
        ready = sorter.get_ready()
        columns.append([name for name in before if name in ready])
        for name in ready:
            ancestors[name] = before[name].union(*(ancestors[source] for source in before[name]))
        sorter.done(*ready)
    arrows = [
        (source, target)
        for target in before
        for source in before[target]
        if not any(source in ancestors[other] for other in before[target])
    ]
    return columns, sorted(arrows)


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


def _means(values: Sequence[float], count: int) -> list[float]:
    """Means of so many stretches of nearly equal length."""
    return [float(part.mean()) for part in np.array_split(np.asarray(values, np.float64), count)]


def _text(text: str) -> str:
    """Text of others as plotly takes it, which has markup of its own."""
    return escape(printable(text), quote=False)


def _ink(style: int) -> str:
    return "var(--faint)" if style == REFERENCE else f"var(--c{style % len(COLOURS)})"
