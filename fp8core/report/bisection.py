"""A bisection for people: aligned columns of text, and a bar chart whose bytes depend on the bisection alone."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from fp8core.alignment.bisect import Bisection, LogprobError
from fp8core.report.columns import columns
from fp8core.report.curves import BLUE, DPI, ORANGE, WIDTH_PX

DRAWN = 20
_FRAME_PX, _UNIT_PX = 200, 34
_THICKNESS = 0.36
_HEADINGS = ("unit", "share alone", "removed", "mean |d|", "tmpe - 1", "max |d|")


def bisection_text(bisection: Bisection) -> str:
    """The ranking, largest share first, and the total below it.

    Errors are those of the unit alone; |d| is in nats per completion token, tmpe is token_mult_prob_error.
    """
    if not bisection.units:
        return f"all {bisection.tokens} log-probs are equal bit for bit; there is nothing to bisect"
    rows = [
        _HEADINGS,
        *((unit.unit, f"{unit.share:.1%}", f"{unit.removed:.1%}", *_numbers(unit.alone)) for unit in bisection.units),
        ("total", "", "", *_numbers(bisection.total)),
    ]
    return "\n".join(columns(rows))


def draw_bisection(bisection: Bisection, path: Path, title: str) -> None:
    """Draw both shares of the first `DRAWN` units as horizontal bars, largest share on top.

    Args:
        bisection: with at least one unit.
        path: the PNG to write, 1200 pixels wide and 34 high for each unit, and a frame; its folder exists.
        title: what was compared with what.
    """
    assert bisection.units, "no error to draw"
    units = bisection.units[:DRAWN]
    size = (WIDTH_PX / DPI, (_FRAME_PX + _UNIT_PX * len(units)) / DPI)
    figure = Figure(figsize=size, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15, wrap=True)
    axes = figure.subplots()
    rows = range(len(units))
    bars = (
        (
            [u.share for u in units],
            -_THICKNESS / 2,
            BLUE,
            "error that this unit alone makes, all else as in the reference",
        ),
        (
            [u.removed for u in units],
            _THICKNESS / 2,
            ORANGE,
            "error that goes when it is as in the reference, all else as in the suspect",
        ),
    )
    for shares, offset, colour, label in bars:
        drawn = axes.barh([row + offset for row in rows], shares, _THICKNESS, color=colour, label=label)
        axes.bar_label(drawn, [f"{share:.1%}" for share in shares], padding=3, fontsize=9)
    axes.set_yticks(rows, [unit.unit for unit in units])
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.02)
    axes.axvline(0.0, color="black", lw=0.8)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    axes.set_xlabel(
        f"share of the total error, mean |d log-prob| = {bisection.total.mean:.3g} nats per token "
        f"({bisection.tokens} tokens)"
    )
    if len(units) < len(bisection.units):
        axes.set_title(f"the {len(units)} largest of {len(bisection.units)} units", fontsize=10)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, format="png", metadata={"Software": None})


def _numbers(error: LogprobError) -> tuple[str, str, str]:
    return f"{error.mean:.3e}", f"{error.mult_prob_error - 1:.3e}", f"{error.largest:.3e}"
