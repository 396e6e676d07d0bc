"""Charts as one PNG, drawn by matplotlib, where a page cannot be shown; its bytes depend on the charts alone."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from fp8core.report.charts import REFERENCE, Chart, Series, colour

DPI = 100
_PANEL_INCHES = (6.0, 3.6)
_DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (8, 3, 2, 3)), (0, (12, 4)))
# One more than dashes, so that 30 styles differ in one of them.
_MARKERS = ("o", "D", "s", "^", "x", "v")
_MARKERS_OF_A_LINE = 10
_LINES_OF_A_PANEL, _LEGEND_COLUMNS = 4, 4


def draw_png(charts: Sequence[Chart], path: Path, title: str, columns: int = 2) -> None:
    """Draw charts in rows of `columns`, each 600 x 360 pixels with its part of a common legend, in the SVG's styles.

    Args:
        charts: at least one.
        path: the PNG to write; its folder exists.
        title: printed above them.
        columns: charts in a row.
    """
    assert charts, "no chart to draw"
    columns = min(columns, len(charts))
    rows = math.ceil(len(charts) / columns)
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.4)
    figure = Figure(figsize=size, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, chart in zip(panels, charts, strict=False):
        _draw(axes, chart)
    for axes in list(panels)[len(charts) :]:
        axes.set_visible(False)
    _legends(figure, charts)
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw(axes: Axes, chart: Chart) -> None:
    axes.set_title(chart.title, fontsize=12)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=chart.x_label == "step"))
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    values = [y for series in chart.series for _, y in series.finite()]
    smallest = min((y for y in values if y > 0), default=None)
    if chart.y_scale == "log" and smallest is not None:
        # Zeros have a place of their own, as in the SVG.
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(smallest)), linscale=0.7)
    for series in chart.series:
        _series(axes, series)
    for bound in chart.bounds if values else ():
        axes.axhline(bound.y, color="0.2", lw=1.0, ls=":")
        # On the left: a legend that finds no free place goes to the right.
        place = (0.01, bound.y)
        axes.annotate(bound.label, place, xycoords=("axes fraction", "data"), ha="left", va="bottom", fontsize=8)
    if chart.include:
        low, high = axes.get_ylim()
        span = max(chart.include) - min(chart.include)
        axes.set_ylim(min(low, min(chart.include) - 0.03 * span), max(high, max(chart.include) + 0.03 * span))
    if not values:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", fontsize=13)


def _legends(figure: Figure, charts: Sequence[Chart]) -> None:
    """One below all panels where they show the same lines and these are many, since it would hide some; else each."""
    names = [[series.label for series in chart.series] for chart in charts]
    if len(names[0]) > _LINES_OF_A_PANEL and all(others == names[0] for others in names):
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize=10)
        return
    for axes, chart in zip(figure.axes, charts, strict=False):
        if any(series.finite() for series in chart.series):
            axes.legend(fontsize=9)


def _series(axes: Axes, series: Series) -> None:
    points = series.finite()
    x, y = [x for x, _ in points], [y for _, y in points]
    ink = colour(series.style)
    if series.style == REFERENCE:
        axes.plot(x, y, "--", color=ink, lw=1.0, label=series.label)
        return
    dash, mark = _DASHES[series.style % len(_DASHES)], _MARKERS[series.style % len(_MARKERS)]
    match series.mark:
        case "dots":
            axes.plot(x, y, mark, color=ink, ms=2.5, alpha=0.5, label=series.label)
        case "outline":
            axes.plot(x, y, color=ink, ls=dash, drawstyle="steps-post", label=series.label)
        case "line":
            every = max(1, len(x) // _MARKERS_OF_A_LINE)
            axes.plot(x, y, color=ink, ls=dash, marker=mark, markevery=every, ms=5, lw=1.4, label=series.label)
