"""The picture of a training: four panels over its steps, as a PNG whose bytes depend on the history alone."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from fp8core.report.summary import ENTROPY, GRAD_NORM, HELDOUT, LENGTH, REWARD, STEP, TMPE, History, series

WIDTH_PX, HEIGHT_PX, DPI = 1200, 800, 100
# Okabe and Ito's palette, told apart by colour-blind readers (jfly.uni-koeln.de/color).
BLUE, ORANGE, GREEN, VERMILION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
GREY = "0.65"
MARKED_STEPS = 200
LEGEND_HEADROOM = 1.15


def draw_curves(history: History, path: Path, title: str) -> None:
    """Draw reward, completion length, mismatch, entropy and gradient norm over the steps of `history` into `path`.

    Args:
        history: one dict a step, see `fp8core.report.summary`; not empty.
        path: the PNG to write, 1200 x 800 pixels; its folder exists.
        title: printed above the panels.
    """
    assert history, "no step to draw"
    figure = Figure(
        figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15)
    panels = figure.subplots(2, 2).flat
    for axes, draw in zip(panels, (_reward, _length, _mismatch, _entropy_and_gradient), strict=True):
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(*_step_limits(history))
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, history)
    figure.savefig(path, format="png", metadata={"Software": None})


def _reward(axes: Axes, history: History) -> None:
    axes.set_title("Reward and held-out accuracy")
    axes.set_ylabel("mean reward, share right")
    _line(axes, history, REWARD, BLUE, "reward")
    steps, accuracy = series(history, HELDOUT)
    size = max(3.0, min(6.0, 200 / max(1, len(steps))))
    axes.plot(steps, accuracy, "D", color=ORANGE, ms=size, mec="black", mew=0.5, label="accuracy on unseen prompts")
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), max(1.05, high))
    axes.legend(loc="lower right")


def _length(axes: Axes, history: History) -> None:
    axes.set_title("Completion length")
    axes.set_ylabel("tokens (mean of the step)")
    _line(axes, history, LENGTH, GREEN, "length")
    axes.set_ylim(bottom=0.0)


def _mismatch(axes: Axes, history: History) -> None:
    axes.set_title("Mismatch of rollout and training")
    steps, values = series(history, TMPE)
    inexact = [(step, value - 1.0) for step, value in zip(steps, values, strict=True) if value != 1.0]
    if not steps:
        _say(axes, "not measured")
    elif not inexact:
        axes.set_ylabel("token_mult_prob_error")
        axes.plot(steps, values, ".-", color=VERMILION, ms=6)
        axes.set_ylim(0.9, 1.1)
        axes.set_yticks([0.9, 1.0, 1.1])
        _say(axes, "exactly 1.0 at every step")
    else:
        axes.set_ylabel("token_mult_prob_error - 1 (log scale)")
        axes.set_yscale("log")
        exact = len(steps) - len(inexact)
        label = f"{exact} of {len(steps)} steps are exactly 0, not drawn" if exact else "excess over exact equality"
        axes.plot(*zip(*inexact, strict=True), ".-", color=VERMILION, ms=6, label=label)
        axes.legend(loc="upper right")


def _entropy_and_gradient(axes: Axes, history: History) -> None:
    axes.set_title("Entropy and gradient norm")
    axes.set_ylabel("entropy (nats per token)")
    _line(axes, history, ENTROPY, PURPLE, "entropy (left)")
    norm_axes = axes.twinx()
    norm_axes.set_ylabel("gradient norm before clipping")
    norm_axes.spines["top"].set_visible(False)
    _line(norm_axes, history, GRAD_NORM, GREY, "gradient norm (right)")
    for side in (axes, norm_axes):
        side.set_ylim(0.0, LEGEND_HEADROOM * side.get_ylim()[1])
    # The entropy lies above the noisier gradient norm; a grid would lie between them.
    axes.set_zorder(norm_axes.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.grid(visible=False)
    axes.legend(handles=[*axes.lines, *norm_axes.lines], loc="upper right", ncols=2)


def _line(axes: Axes, history: History, key: str, colour: str, label: str) -> None:
    steps, values = series(history, key)
    axes.plot(steps, values, ".-", color=colour, ms=6 if len(steps) <= MARKED_STEPS else 0, lw=1.3, label=label)


def _say(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.7, words, transform=axes.transAxes, ha="center", fontsize=14)


def _step_limits(history: History) -> tuple[float, float]:
    steps = [row[STEP] for row in history]
    margin = 0.5 + 0.02 * (max(steps) - min(steps))
    return min(steps) - margin, max(steps) + margin
