"""How a training goes, as a markdown text for where there is no page of its own."""

from collections.abc import Mapping
from statistics import fmean

from fp8core.report.axis import short
from fp8core.report.run_charts import ALIGNMENT, LEARNING, WORST_TOKEN, Curve
from fp8core.report.summary import MISSING, STEP, History


def progress_markdown(run: str, steps: int, rows: History, before: History, seconds: Mapping[str, float]) -> str:
    """The newest steps beside those before them.

    Args:
        run: its name.
        steps: how many it is to have.
        rows: metrics of the newest steps, in order; at least one.
        before: metrics of as many steps before them, or fewer, or none.
        seconds: task -> seconds in the newest steps.
    """
    columns = ["", *(_steps(part) for part in (before, rows) if part)]
    lines = [
        f"**{run}**: step {int(rows[-1][STEP])} of {steps}",
        "",
        _line(columns),
        _line(["---", *("---:" for _ in columns[1:])]),
    ]
    for curve in (*LEARNING, *ALIGNMENT, WORST_TOKEN):
        lines.append(_line([f"{curve.title} ({curve.y_label})", *(_mean(curve, p) for p in (before, rows) if p)]))
    whole = sum(seconds.values())
    if whole > 0:
        shares = ", ".join(f"{task} {share / whole:.0%}" for task, share in seconds.items())
        lines += ["", f"{whole / len(rows):.3g} s of tasks a step: {shares}."]
    return "\n".join(lines) + "\n"


def _steps(rows: History) -> str:
    first, last = int(rows[0][STEP]), int(rows[-1][STEP])
    return f"step {first}" if first == last else f"mean of steps {first} to {last}"


def _mean(curve: Curve, rows: History) -> str:
    values = [curve.of(row) for row in rows if curve.metric in row]
    return short(fmean(values)) if values else MISSING


def _line(cells: list[str]) -> str:
    # A bar would end the cell.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
