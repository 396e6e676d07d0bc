"""Charts as PNG and as SVG, drawn by matplotlib from one description; equal charts give equal bytes.

A chart of a page needs no script, no font and no file beside it. The places of a chart are a group of radio buttons
over its SVG: a pointer or the arrow keys show the values there. Its inks are variables of CSS, so that a page can be
dark.
"""

import io
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fp8core.alignment.bisect import Bisection
from fp8core.durable import write_file
from fp8core.report.chart import (
    BARS,
    COLOURS,
    REFERENCE,
    Chart,
    Drawing,
    Graph,
    Heatmap,
    Node,
    Series,
    Stack,
    bucket_means,
    colour,
    short,
    thinned,
)
from fp8core.store.outputs import PICTURE_METADATA

DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (8, 3, 2, 3)), (0, (12, 4)))
# One more than dashes, so that 30 styles differ in one of them.
MARKERS = ("o", "D", "s", "^", "x", "v")
CELLS, BISECTED = 2000, 20
_HATCHES = ("", "//", "||", "++")
_MARKED_POINTS, _MARKERS_OF_A_LINE, _LARGEST_DECADES = 40, 10, 12
_PNG_DPI, _PANEL_INCHES, _LINES_OF_A_PANEL, _LEGEND_COLUMNS = 100, (6.0, 3.6), 4, 4
_BAR_INCHES, _BAR_FRAME_INCHES, _THICKNESS = 0.34, 2.0, 0.36
# Of an SVG, in pixels.
_ALONE = 6.0
_WIDTH, _LEFT, _RIGHT, _PLOT, _BELOW, _CHARACTER = 400, 58, 390, 190, 42, 6.3
_TITLE, _LEGEND_ROW, _NOTE_ROW = 34, 17, 15
_BOX, _BOX_HEIGHT, _COLUMN, _LINE = 108, 46, 136, 62
_PALE_TO_DARK = LinearSegmentedColormap.from_list("pale to dark", [(0.99, 0.91, 0.63), (0.03, 0.11, 0.35)])
# A dollar in the name of a run is no formula.
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "fp8-grpo", "hatch.linewidth": 0.6, "text.parse_math": False}
_SHORTER = (
    # Nothing refers to groups by name, and every drawing of a page has the same names.
    (r'<g id="[^"]*"', "<g"),
    (r"font-family: [^;\"]*", "font-family: system-ui, sans-serif"),
    (r' transform="rotate\(-0 [^)]*\)"', ""),
    (r"\s*\n\s*", " "),
    # The paper of a hatch; a variable has to be in a style.
    (r'<rect ([^>]*) fill="(#[0-9a-f]{6})"', r'<rect \1 style="fill: \2"'),
)
# Ink -> the variable of CSS that replaces it on a page; without the variable it stays as it is.
_INKS = {
    "#000000": "ink", "#222222": "ink", "#333333": "ink", "#555555": "faint", "#767676": "faint", "#ebebeb": "grid",
    "#ffffff": "paper", **{ink.lower(): f"c{i}" for i, ink in enumerate(COLOURS[:-1])},
}  # fmt: skip


class Spot(NamedTuple):
    """A rectangle in the coordinates of its axes, and the words that are shown when it is pointed at.

    Without `bottom` and `top` it is as high as the axes.
    """

    axes: Axes
    left: float
    right: float
    words: str
    bottom: float | None = None
    top: float | None = None


@rc_context(_STYLE)
def draw_png(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Draw a PNG of one chart or several in rows of two, each 600 x 360 pixels with its part of a common legend."""
    assert charts, "no chart to draw"
    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure = _png_figure(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.4, title)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, chart in zip(panels, charts, strict=False):
        axes.set_title(chart.title, fontsize=12)
        _draw_chart(axes, chart)
    for axes in panels[len(charts) :]:
        axes.set_visible(False)
    names = [[series.label for series in chart.series] for chart in charts]
    if len(names[0]) > _LINES_OF_A_PANEL and all(others == names[0] for others in names):
        # In a panel whose lines fill it, a legend of so many would hide some of them.
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize=10)
    else:
        for axes, chart in zip(panels, charts, strict=False):
            if any(series.finite() for series in chart.series):
                axes.legend(fontsize=9)
    _write_png(figure, path)


@rc_context(_STYLE)
def draw_bisection(bisection: Bisection, path: Path, title: str) -> None:
    """Draw both shares of the first `BISECTED` units, at least one, as horizontal bars, largest share on top.

    The PNG is 1200 pixels wide and 34 high for each unit, and a frame.
    """
    assert bisection.units, "no error to draw"
    units = bisection.units[:BISECTED]
    figure = _png_figure(2 * _PANEL_INCHES[0], _BAR_FRAME_INCHES + _BAR_INCHES * len(units), title)
    axes, rows = figure.subplots(), range(len(units))
    alone = "error that this unit alone makes, all else as in the reference"
    removed = "error that goes when it is as in the reference, all else as in the suspect"
    bars = (
        ([unit.share for unit in units], -_THICKNESS / 2, COLOURS[0], alone),
        ([unit.removed for unit in units], _THICKNESS / 2, COLOURS[3], removed),
    )
    for shares, offset, ink, label in bars:
        drawn = axes.barh([row + offset for row in rows], shares, _THICKNESS, color=ink, label=label)
        axes.bar_label(drawn, [f"{share:.1%}" for share in shares], padding=3, fontsize=9)
    axes.set_yticks(rows, [unit.unit for unit in units])
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.02)
    axes.axvline(0.0, color="black", lw=0.8)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    nats = f"mean |d log-prob| = {bisection.total.mean:.3g} nats per token ({bisection.tokens} tokens)"
    axes.set_xlabel(f"share of the total error, {nats}")
    if len(units) < len(bisection.units):
        axes.set_title(f"the {len(units)} largest of {len(bisection.units)} units", fontsize=10)
    _plain(axes, "x")
    figure.legend(loc="outside lower center", ncols=2)
    _write_png(figure, path)


def _write_png(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata=PICTURE_METADATA)
    write_file(path, buffer.getvalue())


def figure_html(drawing: Drawing) -> str:
    """The drawing as an SVG in HTML, 400 pixels wide or more, with the values of its places above it."""
    with rc_context(_STYLE):
        match drawing:
            case Chart():
                figure, spots = _chart_figure(drawing)
            case Stack():
                figure, spots = _stack_figure(drawing)
            case Heatmap():
                figure, spots = _heatmap_figure(drawing)
            case Graph():
                figure, spots = _graph_figure(drawing)
        FigureCanvasSVG(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", dpi=2 * figure.dpi)
    width, height = figure.bbox.width, figure.bbox.height
    inside = buffer.getvalue().partition("<defs>")[2].rpartition("</svg>")[0]
    for pattern, replacement in _SHORTER:
        inside = re.sub(pattern, replacement, inside)
    inside = re.sub(r'="[^"]*"', lambda attribute: _themed(re.sub(r"(\d\.\d\d)\d+", r"\1", attribute[0])), inside)
    title = escape(drawing.title)
    return (
        f'<div class="{"plot" if width <= _WIDTH else "plot wide"}" style="width:{width:g}px">'
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{title}"><defs>{inside}</svg>'
        f"{_places(spots, figure, title)}</div>\n"
    )


def _themed(attribute: str) -> str:
    if not attribute.startswith('="') or ": #" not in attribute:
        return attribute
    return re.sub(
        r"#[0-9a-f]{6}", lambda ink: f"var(--{_INKS[ink[0]]},{ink[0]})" if ink[0] in _INKS else ink[0], attribute
    )


def _png_figure(width: float, height: float, title: str) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(width, height), dpi=_PNG_DPI, layout=layout)
    FigureCanvasAgg(figure)
    # To wrap a title, matplotlib measures text between dollars as a formula, whatever the style.
    figure.suptitle(title, fontsize=15, wrap="$" not in title)
    return figure


def _plain(axes: Axes, grid: Literal["both", "x"]) -> None:
    axes.grid(axis=grid, color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# Charts


def _draw_chart(axes: Axes, chart: Chart) -> None:
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=chart.x_label == "step"))
    _plain(axes, "both")
    values = [y for series in chart.series for _, y in series.finite()]
    positive = [y for y in values if y > 0]
    if chart.y_scale == "log" and positive:
        # Zeros have a place of their own.
        threshold = max(min(positive), max(positive) / 10.0**_LARGEST_DECADES)
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(threshold)), linscale=0.7)
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
    for series in chart.series:
        _draw_series(axes, thinned(series))
    for bound in chart.bounds if values else ():
        axes.axhline(bound.y, color="0.2", lw=1.0, ls=":")
        # On the left: a legend that finds no free place goes to the right.
        place = (0.01, bound.y)
        axes.annotate(bound.label, place, xycoords=("axes fraction", "data"), ha="left", va="bottom", fontsize=8)
    included = [*chart.include, *((0.0, 1.0) if chart.y_scale == "log" and {*values} == {0.0} else ())]
    if included:
        low, high = axes.get_ylim()
        span = max(included) - min(included)
        low, high = min(low, min(included) - 0.03 * span), max(high, max(included) + 0.03 * span)
        if values and chart.y_scale == "linear":
            # Room for half a marker: what matplotlib left is a share of the values' range, which may be small.
            room = 0.04 * (high - low)
            low = min(low, min(values) - room) if min(values) < min(included) else low
            high = max(high, max(values) + room)
        axes.set_ylim(low, high)
    if not values:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", fontsize=13)


def _draw_series(axes: Axes, series: Series) -> None:
    points = series.finite()
    x, y = [x for x, _ in points], [y for _, y in points]
    ink = colour(series.style)
    if series.style == REFERENCE:
        axes.plot(x, y, "--", color=ink, lw=1.0, label=series.label)
        return
    dash, mark = DASHES[series.style % len(DASHES)], MARKERS[series.style % len(MARKERS)]
    match series.mark:
        case "dots":
            axes.plot(x, y, mark, color=ink, ms=2.5, mew=0, alpha=0.5, label=series.label, rasterized=True)
        case "outline":
            axes.plot(x, y, color=ink, ls=dash, drawstyle="steps-post", label=series.label)
        case "line":
            every = 1 if len(x) <= _MARKED_POINTS else len(x) // _MARKERS_OF_A_LINE
            axes.plot(x, y, color=ink, ls=dash, marker=mark, markevery=every, ms=4.5, lw=1.4, label=series.label)


def _chart_figure(chart: Chart) -> tuple[Figure, list[Spot]]:
    figure, axes = _framed(chart, [series.label for series in chart.series])
    _draw_chart(axes, chart)
    _legend(figure, axes)
    values: dict[float, list[str]] = defaultdict(list)
    for series in map(thinned, chart.series):
        if series.mark != "dots" and series.style != REFERENCE:
            for x, y in series.finite():
                values[x].append(f"{series.label}: {short(y)}")
    ordered, limits = sorted(values), axes.get_xlim()
    if any(series.mark == "outline" for series in chart.series):
        # A column for each bar, which begins at its x; the last x is the end of the last one.
        edges = ordered
    else:
        # A column for each x, from half-way to its neighbour to half-way to the next.
        edges = [limits[0], *((a + b) / 2 for a, b in pairwise(ordered)), limits[1]]
    words = ["\n".join([f"{chart.x_label} {short(x)}", *values[x]]) for x in ordered]
    return figure, [Spot(axes, a, b, text) for (a, b), text in zip(pairwise(edges), words, strict=False)]


def _stack_figure(stack: Stack) -> tuple[Figure, list[Spot]]:
    """Layers from the bottom up, in the order of the legend; at most 120 bars, each the mean of its steps."""
    figure, axes = _framed(stack, list(stack.layers))
    bars = min(BARS, len(stack.x)) if stack.layers else 0
    axes.set_xlabel(stack.x_label)
    axes.set_ylabel(stack.y_label)
    _plain(axes, "both")
    if not bars:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", fontsize=13)
        return figure, []
    edges = _edges(stack.x, bars)
    heights = {name: np.nan_to_num(bucket_means(values, bars)) for name, values in stack.layers.items()}
    below = np.zeros(bars)
    for style, (name, values) in enumerate(heights.items()):
        layer = axes.stairs(below + values, edges, baseline=below, fill=True, lw=0.5, ec="white", label=name)
        chosen = stack.styles.get(name, style)
        layer.set(facecolor=colour(chosen), hatch=_HATCHES[chosen % len(_HATCHES)])
        below = below + values
    axes.set_xlim(edges[0], max(edges[-1], stack.last_x + 0.5))
    axes.set_ylim(0.0, max(float(below.max()), stack.tallest, 1e-9) * 1.04)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
    _legend(figure, axes)
    spots = []
    for i, (left, right) in enumerate(pairwise(edges)):
        parts = [f"{name}: {short(y[i])} ({y[i] / below[i]:.0%})" for name, y in heights.items() if below[i] > 0]
        words = [f"{stack.x_label} {_span(left, right)}: {short(float(below[i]))}", *parts]
        spots.append(Spot(axes, left, right, "\n".join(words)))
    return figure, spots


# Heat maps


def _heatmap_figure(heatmap: Heatmap) -> tuple[Figure, list[Spot]]:
    """Panels above one another, dark where values are large, with one colour scale; at most 4,000 cells in all."""
    rows = [values for panel in heatmap.panels.values() for values in panel]
    columns = min(len(heatmap.x), max(12, CELLS // max(1, len(rows))))
    positive = [*heatmap.positive(), *heatmap.also]
    if not positive or not columns:
        figure, axes = _framed(heatmap, [], 40.0)
        axes.set_axis_off()
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", fontsize=13)
        return figure, []
    edges, low, high = _edges(heatmap.x, columns), min(positive), max(positive)
    norm = LogNorm(low, high) if low < high else LogNorm(low / 2, high * 2)
    heights = [max(24.0, len(panel) * (12.0 if len(panel) <= 8 else 5.0)) for panel in heatmap.panels.values()]
    figure, whole = _framed(heatmap, [], sum(heights) + 26.0 * len(heights) + 44.0)
    whole.set_axis_off()
    y, spots = figure.bbox.height - _TITLE, list[Spot]()
    for (name, panel), height in zip(heatmap.panels.items(), heights, strict=True):
        y -= height + 26.0
        axes = figure.add_axes(_axes_box(figure, y, height))
        means = np.ma.masked_invalid([bucket_means(values, columns) for values in panel])
        cells = np.ma.masked_less_equal(means, 0.0)
        sides = np.arange(len(panel) + 1) - 0.5
        mesh = axes.pcolormesh(edges, sides, cells, norm=norm, cmap=_PALE_TO_DARK, rasterized=True)
        axes.set_title(name, fontsize=11, loc="left", pad=4)
        axes.set_ylabel(heatmap.y_label)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
        axes.tick_params(labelbottom=False)
        axes.set_xlim(edges[0], max(edges[-1], heatmap.last_x + 0.5))
        axes.invert_yaxis()
        for i, values in enumerate(cells):
            for a, b, value in _runs(edges, values.filled(math.nan)):
                words = f"{name}, {heatmap.y_label} {i}, {heatmap.x_label} {_span(a, b)}: {short(value)}"
                spots.append(Spot(axes, a, b, words, i - 0.5, i + 0.5))
    axes.tick_params(labelbottom=True)
    axes.set_xlabel(heatmap.x_label)
    # Below the label of the steps, and with room at its ends for half a number.
    scale = figure.add_axes((0.5, (y - 56.0) / figure.bbox.height, 0.36, 10.0 / figure.bbox.height))
    ticks = sorted({low, high})
    figure.colorbar(mesh, cax=scale, orientation="horizontal", ticks=ticks, format=lambda value, _: short(value))
    scale.minorticks_off()
    scale.set_ylabel(heatmap.value_label, rotation=0, ha="right", va="center")
    return figure, spots


def _runs(edges: Sequence[float], values: Sequence[float]) -> Iterator[tuple[float, float, float]]:
    """Stretches of equal values that are not NaN: begin, end, value."""
    begin = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[begin]:
            if not math.isnan(values[begin]):
                yield edges[begin], edges[i], float(values[begin])
            begin = i


# Graphs


def _graph_figure(graph: Graph) -> tuple[Figure, list[Spot]]:
    """Boxes in columns, shaded by weight, and the edges that no longer path implies."""
    columns: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        columns[node.column].append(node)
    tallest = max(map(len, columns.values()), default=1)
    width, height = max(_WIDTH, 12 + (max(columns, default=0) + 1) * _COLUMN), float(tallest * _LINE)
    figure, axes = _framed(graph, [], height, width)
    axes.set_position((0.0, axes.get_position().y0, 1.0, height / figure.bbox.height))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    places = {
        node.name: (12.0 + node.column * _COLUMN, (height + (2 * i + 1 - len(column)) * _LINE) / 2)
        for column in columns.values()
        for i, node in enumerate(column)
    }
    spots = []
    for source, target, name in _reduced(graph.edges):
        (x0, y0), (x1, y1) = (places[source][0] + _BOX, places[source][1]), places[target]
        bend, middle = (x1 - x0) / 2, (y0 + y1) / 2
        curve = Curve([(x0, y0), (x0 + bend, y0), (x1 - bend, y1), (x1, y1)], [Curve.MOVETO, *[Curve.CURVE4] * 3])
        axes.add_patch(FancyArrowPatch(path=curve, arrowstyle="-|>", mutation_scale=8, color="#222222", lw=1.0))
        spots.append(Spot(axes, x0, x1, name, middle - 8, middle + 8))
    for node in graph.nodes:
        x, y = places[node.name]
        shade = to_rgba(COLOURS[0], 0.45 * node.weight)
        box = FancyBboxPatch(
            (x, y - _BOX_HEIGHT / 2), _BOX, _BOX_HEIGHT, "round,pad=0,rounding_size=5", fc=shade, ec="#222222"
        )
        axes.add_patch(box)
        for i, line in enumerate(node.lines):
            style = {"fontsize": 11, "weight": "bold"} if i == 0 else {"fontsize": 10}
            axes.text(x + _BOX / 2, y - 4 + 16 * i, line, ha="center", **style)
        spots.append(Spot(axes, x, x + _BOX, node.hint, y - _BOX_HEIGHT / 2, y + _BOX_HEIGHT / 2))
    return figure, spots


def _reduced(edges: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    following: dict[str, set[str]] = defaultdict(set)
    for source, target, _ in edges:
        following[source].add(target)

    def reachable(start: str, seen: set[str]) -> set[str]:
        for after in following.get(start, set()) - seen:
            seen |= {after}
            reachable(after, seen)
        return seen

    def implied(source: str, target: str) -> bool:
        return any(target in reachable(other, set()) for other in following[source] - {target})

    return [edge for edge in edges if not implied(edge[0], edge[1])]


# The frame of an SVG


def _framed(drawing: Drawing, labels: Sequence[str], plot: float = _PLOT, width: float = _WIDTH) -> tuple[Figure, Axes]:
    notes = wrap(drawing.note, int((width - 24) / (_CHARACTER * 11 / 12)))
    rows = -(-len(labels) // _legend_columns(labels))
    above, below = _TITLE + rows * _LEGEND_ROW, _BELOW + (8 + _NOTE_ROW * len(notes) if notes else 0)
    figure = Figure(figsize=((width) / 72, (above + plot + below) / 72), dpi=72)
    height = figure.bbox.height
    figure.text(12 / width, 1 - 18 / height, drawing.title, fontsize=14, weight="bold")
    for i, line in enumerate(notes):
        figure.text(12 / width, (_NOTE_ROW * (len(notes) - 1 - i) + 8) / height, line, fontsize=11, color="#555555")
    return figure, figure.add_axes(_axes_box(figure, below, plot))


def _axes_box(figure: Figure, bottom: float, plot: float) -> tuple[float, float, float, float]:
    width, height = figure.bbox.width, figure.bbox.height
    return _LEFT / width, bottom / height, (_RIGHT - _LEFT) / width, plot / height


def _legend_columns(labels: Sequence[str]) -> int:
    longest = max(map(len, labels), default=0)
    return min(max(1, len(labels)), max(1, int((_WIDTH - 12) // (_CHARACTER * longest + 48))))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            [_legible(handle) for handle in handles],
            labels,
            loc="upper left",
            bbox_to_anchor=(12 / figure.bbox.width, 1 - 25 / figure.bbox.height),
            ncols=_legend_columns(labels),
            fontsize=11,
            frameon=False,
            labelspacing=0.35,
            handlelength=2.6,
            borderpad=0.0,
            borderaxespad=0.0,
        )


def _legible(handle: Artist) -> Artist:
    """The element as a legend shows it: dots are faint and small in a crowd, but one of them has to be seen alone."""
    if not isinstance(handle, Line2D) or handle.get_alpha() is None:
        return handle
    alone = Line2D([], [], ls="", marker=handle.get_marker(), color=handle.get_color(), mew=0, ms=_ALONE)
    alone.set_label(handle.get_label())
    return alone


def _edges(x: Sequence[float], buckets: int) -> list[float]:
    return [*(x[round(i * len(x) / buckets)] - 0.5 for i in range(buckets)), x[-1] + 0.5]


def _span(left: float, right: float) -> str:
    first, last = left + 0.5, right - 0.5
    return f"{first:g}" if first == last else f"{first:g} to {last:g}"


def _places(spots: Sequence[Spot], figure: Figure, title: str) -> str:
    """Radio buttons over the drawing, which show their words when they are pointed at, touched or reached by a key."""
    if not spots:
        return ""
    width, height = figure.bbox.width, figure.bbox.height
    group = f"v{sha256(title.encode()).hexdigest()[:10]}"
    labels = []
    for spot in spots:
        transform, box = spot.axes.transData, spot.axes.bbox
        (left, _), (right, _) = transform.transform([(spot.left, 1.0), (spot.right, 1.0)])
        low, high = box.y0, box.y1
        if spot.bottom is not None and spot.top is not None:
            low, high = sorted(y for _, y in transform.transform([(spot.left, spot.bottom), (spot.left, spot.top)]))
        at = f"left:{left / width:.2%};width:{max(1.0, right - left) / width:.2%}"
        if spot.bottom is not None:
            at += f";top:{1 - high / height:.1%};height:{(high - low) / height:.1%}"
        kind = ("box " if spot.bottom is not None else "") + ("r" if left + right > width else "l")
        words = escape(spot.words)
        labels.append(
            f'<label class="{kind}" style="{at}"><input type="radio" name="{group}"/><span>{words}</span></label>'
        )
    axes = spots[0].axes.bbox
    at = f"--top:{1 - axes.y1 / height:.1%};--height:{axes.height / height:.1%}"
    return f'<div class="values" style="{at}" role="radiogroup" aria-label="Values of {title}">{"".join(labels)}</div>'
