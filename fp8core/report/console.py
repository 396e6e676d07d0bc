"""The display of a training while it runs: on a terminal of 80 columns or more, or as plain lines in a log file.

Rows stay within the width; paths and commands are printed whole, so that they can be copied.
"""

from collections.abc import Mapping, Sequence
from typing import TextIO

import rich.console
from rich.text import Text

from fp8core.errors import printable
from fp8core.metric import Metric
from fp8core.metrics.registry import METRICS
from fp8core.metrics.reward import SIGNAL
from fp8core.progress import Part, clock
from fp8core.report.chart import MISSING, format_value
from fp8core.store.metrics import STEP

SAMPLE_EVERY = 10
_WIDTH = 120
_HEADER_EVERY = 20
_LEGEND = (
    "tmpe 1: both policies give equal probabilities; differ: tokens where they do not\n"
    "!: the scores of every group were equal"
)
_COLUMNS = {metric.column: metric for metric in METRICS if metric.column is not None}


class Console:
    """Live output of one training, without control characters in a file; names and texts of others are escaped."""

    def __init__(self, file: TextIO, steps: int) -> None:
        self._console = rich.console.Console(file=file, highlight=False)
        self._console.width = min(_WIDTH, self._console.width)
        self._steps = steps
        self._seconds = list[float]()
        self._widths = {
            "step": 2 * len(str(steps)) + 1,
            **{column.title: column.width for column in _COLUMNS},
            **{"seconds": 7, "left": 7},
        }

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text)), soft_wrap=True)

    def section(self, title: str, paragraphs: Sequence[str], places: Mapping[str, str]) -> None:
        """A title, then paragraphs, then addresses with their labels."""
        self._console.print(Text(printable(title), style="bold"), soft_wrap=True)
        width = max(map(len, places), default=0)
        for line in (*paragraphs, *(f"  {label:<{width}}  {place}" for label, place in places.items())):
            self.note(line)

    def part(self, name: str) -> Part:
        return Part(name, self.note)

    def step(self, metrics: Mapping[str, float], seconds: float, task_seconds: Mapping[str, float]) -> None:
        """One line for a finished step with the task that took longest; a metric that is absent is shown as "-"."""
        if not self._seconds:
            self._console.print(Text(_LEGEND, style="dim"), soft_wrap=True)
        if len(self._seconds) % _HEADER_EVERY == 0:
            self._row({name: name for name in self._widths}, "slowest task")
        self._seconds.append(seconds)
        step = int(metrics[STEP])
        newest = self._seconds[-_HEADER_EVERY:]
        cells = {
            "step": f"{step}/{self._steps}",
            **{column.title: _cell(metric, metrics) for column, metric in _COLUMNS.items()},
            "seconds": f"{seconds:.2f}",
            "left": clock(sum(newest) / len(newest) * (self._steps - step)),
        }
        slowest = max(task_seconds, key=task_seconds.__getitem__, default=None)
        last = MISSING if slowest is None else f"{printable(slowest)} {task_seconds[slowest] / seconds:.0%}"
        self._row(cells, f"! {last}" if metrics.get(SIGNAL.name) == 0 else last)

    def sample(self, prompt: str, completion: str, reward: float) -> None:
        """The reward, the begin of a prompt, and the end of what the policy wrote, which has the answer, in a line."""
        prompt_text, completion_text = (printable(" ".join(text.split())) for text in (prompt, completion))
        room = self._console.width // 2 - 12
        line = f"  reward {reward:.3g}  {prompt_text[:room]} -> {completion_text[-room:]}"
        self._console.print(Text(line, style="dim"), no_wrap=True, overflow="ellipsis")

    def _row(self, cells: Mapping[str, str], slowest: str) -> None:
        numbers = [cells[name].rjust(width) for name, width in self._widths.items()]
        self._console.print(Text(" ".join([*numbers, slowest])), no_wrap=True, overflow="ellipsis")


def shows_sample(step: int, steps: int) -> bool:
    """True for a step whose completion is shown: the first, so that a late one has an early one beside it, and last."""
    return step in (1, steps) or step % SAMPLE_EVERY == 0


def _cell(metric: Metric, metrics: Mapping[str, float]) -> str:
    return format_value(metrics[metric.name], metric.form) if metric.name in metrics else MISSING
