"""Charts as one PNG, drawn by matplotlib."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from fp8core.durable import write_file
from fp8core.report.chart import ALARM, Chart, colour, short

_DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (8, 3, 2, 3)), (0, (12, 4)))
# A dollar in the name of a run is no formula.
_STYLE: Any = {"text.parse_math": False}


@rc_context(_STYLE)
def draw_png(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Draw charts of lines in rows of two, each 600 x 360 pixels, below one title and with one legend."""
    rows = math.ceil(len(charts) / 2)
    figure = Figure(figsize=(12.0, 3.6 * rows + 0.4), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15)
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes, chart in zip(panels, charts, strict=False):
        _draw_chart(axes, chart)
    for axes in panels[len(charts) :]:
        axes.set_visible(False)
    if len(charts[0].series) > 1:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_file(path, buffer.getvalue())


def _draw_chart(axes: Axes, chart: Chart) -> None:
    axes.set_title(chart.title, fontsize=12, pad=16 if chart.collapses else 6)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    values = chart.values
    positive = [y for y in (*values, *(bound.y for bound in chart.bounds)) if y > 0]
    if chart.y_scale == "log" and positive:
        # Zeros have a place of their own.
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(positive))), linscale=0.7)
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
    elif chart.y_scale == "log":
        axes.set_ylim(-0.05, 1.0)
    for series in chart.series:
        points = series.finite()
        style = series.style
        look: dict[str, Any] = {"color": colour(style), "ls": _DASHES[style % len(_DASHES)], "lw": 1.4, "ms": 4.5}
        look |= {"marker": "o", "markevery": max(1, len(points) // 10) if len(points) > 40 else 1}
        axes.plot([x for x, _ in points], [y for _, y in points], label=series.label, **look)
    for number, bound in enumerate(chart.bounds if values else ()):
        axes.axhline(bound.y, color="0.2", lw=1.0, ls=":")
        # Labels of two bounds may be close, so they are on different sides.
        x, side = ((0.01, "left"), (0.99, "right"))[number % 2]
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (0, 4), "textcoords": "offset points"}
        axes.annotate(bound.label, (x, bound.y), ha=side, va="bottom", fontsize=8, **place)
    for collapse in chart.collapses:
        axes.axvline(collapse.step, color=ALARM, lw=1.2, ls="--")
        place = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        axes.annotate(collapse.label, (collapse.step, 1.01), color=ALARM, fontsize=8, **place)
    for y in chart.include if values else ():
        axes.axhline(y, alpha=0.0)
    if not values:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", fontsize=13)
