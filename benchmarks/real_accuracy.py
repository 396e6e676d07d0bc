"""The cost of FP8 in held-out accuracy of a pretrained checkpoint, over tasks and seeds: verdict, tables and picture.

A pair is two trainings of one task and one seed: a variant and BF16. They answer the same held-out prompts, and each
prompt gives one difference, at the end and as the mean of the curve. The interval of the mean is over pairs and prompts
as two crossed samples (`fp8core.parity.crossed_interval`). Prompts of different tasks share a column by their
rank alone. As that pairs them at random, the variance of the mean is that of prompts within tasks.

Tasks are those that were trained, and no sample of others: what they differ by widens the interval all the same. The
rounding of a checkpoint is one draw, which neither seeds nor prompts average. So BF16 from a checkpoint that was
rounded anew stands beside FP8, with another rounding for each seed. Its gap is what a draw is worth by itself.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.harness import Row, table
from fp8core.parity import BASELINE, FAIL, NOT_ENOUGH, PASS, LearningCurve, Pair, curve_difference, end_difference

FP8, REDRAWN = "fp8-end-to-end-kv", "bf16-redrawn"
VARIANTS = {BASELINE: "BF16", REDRAWN: "BF16, rounded anew", FP8: "FP8 everywhere"}
LEAST_MEAN, WIDEST = -0.01, 0.02
"""The mean gap of FP8 is no less than the first, and its interval lies within the second on both sides of zero."""
ALL = "all"
WINDOWS = {"end": "at the end", "curve": "mean of the curve"}
_COLOURS = {REDRAWN: "#8c8c8c", FP8: "#0072b2"}


class TrainedCurve(NamedTuple):
    task: str
    variant: str
    seed: int
    curve: LearningCurve


def gap_rows(trained: Sequence[TrainedCurve], pairs: int, last: int) -> list[Row]:
    """A row for each variant, window and task, and for all tasks together, of what there are two pairs of or more.

    Args:
        trained: curves that are as long as those of BF16 of the same task and seed; others make no pair.
        pairs: how many a variant has when all is trained; with fewer nothing passes.
        last: evaluations that are the end.
    """
    rows = []
    for variant in VARIANTS:
        by_task = _pairs(trained, variant) if variant != BASELINE else {}
        together = [pair for of_task in by_task.values() for pair in of_task]
        for task, found in {ALL: together, **by_task}.items():
            if len(found) < 2:
                continue
            gaps = {"end": end_difference(found, last), "curve": curve_difference(found)}
            for window, gap in gaps.items():
                row = {"kind": "gap", "variant": variant, "task": task, "window": window, "pairs": len(found)}
                row |= {"mean": gap.value, "low": gap.low, "high": gap.high}
                judged = {"outcome": outcome(row, pairs)} if (variant, task) == (FP8, ALL) else {}
                rows.append(row | judged)
    return rows


def _pairs(trained: Sequence[TrainedCurve], variant: str) -> dict[str, list[Pair]]:
    """By task, of the seeds that both have."""
    baseline = {(each.task, each.seed): each.curve for each in trained if each.variant == BASELINE}
    found: dict[str, list[Pair]] = {}
    for each in trained:
        other = baseline.get((each.task, each.seed))
        if each.variant == variant and other is not None and other.steps == each.curve.steps:
            found.setdefault(each.task, []).append(Pair(each.curve, other))
    return found


def outcome(gap: Row, pairs: int) -> str:
    """FAIL where the mean is below its bound, PASS where all pairs are there and the interval is within its own."""
    if gap["mean"] < LEAST_MEAN:
        return FAIL
    within = gap["low"] >= -WIDEST and gap["high"] <= WIDEST
    return PASS if within and gap["pairs"] == pairs else NOT_ENOUGH


# Tables


def accuracy_tables(rows: Sequence[Row]) -> list[str]:
    """The verdict over all tasks and seeds, the gap by step, and the gaps of each task."""
    gaps = [row for row in rows if row["kind"] == "gap"]
    return [verdict_table(gaps), step_table(rows), task_table(rows, gaps)]


def verdict_table(gaps: Iterable[Row]) -> str:
    """Gaps over all tasks and seeds, in points, with bounds and outcome for FP8."""
    bound = f"mean >= {100 * LEAST_MEAN:+.1f}, interval within {100 * WIDEST:.0f}"
    lines = []
    for row in (row for row in gaps if row["task"] == ALL):
        judged = [bound, row["outcome"]] if "outcome" in row else ["the size of a draw", ""]
        lines.append([VARIANTS[row["variant"]], WINDOWS[row["window"]], str(row["pairs"]), _points(row), *judged])
    return table(["held-out accuracy minus BF16", "", "pairs", "points (interval)", "bound", "outcome"], lines)


def step_table(rows: Iterable[Row]) -> str:
    """Held-out accuracy minus BF16 by step, in points, means of all tasks and seeds."""
    curves: dict[str, list[dict[str, float]]] = {}
    for row in (row for row in rows if row["kind"] == "alignment"):
        curves.setdefault(row["variant"], []).append({str(step): value for step, value in row["curve"].items()})
    steps = [*curves[BASELINE][0]]
    base, *others = (
        [variant, *(fmean(curve[step] for curve in of_variant) for step in steps)]
        for variant, of_variant in sorted(curves.items(), key=lambda found: [*VARIANTS].index(found[0]))
    )
    lines = [
        [VARIANTS[variant], *(f"{100 * (value - bf16):+.1f}" for value, bf16 in zip(values, base[1:], strict=True))]
        for variant, *values in others
    ]
    return table(["points from BF16 after step", *steps], lines)


def task_table(rows: Iterable[Row], gaps: Sequence[Row]) -> str:
    """A line for each task and variant: accuracies, means over its seeds, and gaps to BF16, in points."""
    gap_of = {(row["task"], row["variant"], row["window"]): row for row in gaps}
    of_variant: dict[tuple[str, str], list[Row]] = {}
    for row in (row for row in rows if row["kind"] == "alignment"):
        of_variant.setdefault((row["task"], row["variant"]), []).append(row)
    lines = []
    for (task, variant), trained in of_variant.items():
        numbers = [f"{fmean(row[key] for row in trained):.3f}" for key in ("heldout_first", "heldout_last")]
        cells = [_points(gap_of[key]) if (key := (task, variant, each)) in gap_of else "" for each in WINDOWS]
        error = f"{max(row['tmpe_max'] for row in trained):.5f}"
        lines.append([task, VARIANTS[variant], str(len(trained)), *numbers, *cells, error])
    header = ["task", "variant", "seeds", "held-out, first", "last"]
    return table([*header, *(f"gap {words}, points" for words in WINDOWS.values()), "largest error"], lines)


def _points(gap: Row) -> str:
    # Adding zero after rounding leaves no "-0.0".
    mean, low, high = (f"{round(100 * gap[key], 1) + 0.0:+.1f}" for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


# Picture


def draw_gaps(rows: Iterable[Row], path: Path) -> None:
    """Gaps to BF16 by task, and of all tasks: FP8 beside BF16 from another rounding; a panel for each window."""
    gaps = [row for row in rows if row["kind"] == "gap"]
    tasks = sorted({row["task"] for row in gaps}, key=lambda task: (task != ALL, task))
    figure = Figure(figsize=(10, 1.3 + 0.6 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(WINDOWS), sharex=True, sharey=True)
    for axes, (window, words) in zip(panels, WINDOWS.items(), strict=True):
        _panel(axes, tasks, [row for row in gaps if row["window"] == window])
        axes.set_title(words, loc="left")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, frameon=False)
    figure.supxlabel("held-out accuracy minus BF16, points, with 95 % intervals", fontsize="medium")
    figure.savefig(path, dpi=150, facecolor="white")


def _panel(axes: Axes, tasks: Sequence[str], gaps: Sequence[Row]) -> None:
    places = {task: place for place, task in enumerate(tasks)}
    axes.axvspan(-100 * WIDEST, 100 * WIDEST, color="#eeeeee", label=f"within {100 * WIDEST:.0f} points")
    axes.axvline(100 * LEAST_MEAN, color="black", linestyle=":", linewidth=0.8, label="least mean of all")
    axes.axvline(0, color="black", linewidth=0.8)
    for offset, (variant, colour) in zip((-0.14, 0.14), _COLOURS.items(), strict=True):
        found = [row for row in gaps if row["variant"] == variant]
        axes.errorbar(
            [100 * row["mean"] for row in found],
            [places[row["task"]] + offset for row in found],
            xerr=[
                [100 * (row["mean"] - row["low"]) for row in found],
                [100 * (row["high"] - row["mean"]) for row in found],
            ],
            fmt="o",
            color=colour,
            capsize=3,
            label=VARIANTS[variant],
        )
    axes.set_yticks(range(len(tasks)), ["all together" if task == ALL else task for task in tasks])
    axes.set_ylim(-0.5, len(tasks) - 0.5)
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
