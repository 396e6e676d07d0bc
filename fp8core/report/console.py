"""The display of a training while it runs: on a terminal of 80 columns or more, or as plain lines in a log file.

Tables and numbers stay within the width; paths and commands are printed whole, so that they can be copied.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import rich.console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fp8core.errors import printable
from fp8core.progress import Part, clock
from fp8core.report.chart import MISSING, counted, format_tmpe
from fp8core.report.summary import CURVES, REPORT, ComparedTokens, Summary
from fp8core.store.metrics import HELDOUT, LENGTH, REWARD, SIGNAL, STALENESS, STEP, TMPE, TOKENS_DIFFERING

SAMPLE_EVERY = 10
_WIDTH, _HEADER_EVERY = 120, 20
_LEGEND = (
    "tmpe 1: both policies give equal probabilities; differ: tokens where they do not\n"
    "(held-out): of an earlier step; !: the scores of every group were equal"
)
_AGE_LEGEND = "age: mean number of versions that a token is older than the newest policy"
_LEAST_SHARE_SHOWN = 0.01
_COLUMNS = {"reward": 6, "held-out": 8, "length": 6, "tmpe": 9, "differ": 6, "seconds": 7, "left": 7}


class Console:
    """Live output of one training, without control characters in a file; names and texts of others are escaped."""

    def __init__(self, file: TextIO, steps: int) -> None:
        self._console = rich.console.Console(file=file, highlight=False)
        self._console.width = min(_WIDTH, self._console.width)
        self._steps = steps
        self._heldout: float | None = None
        self._seconds = list[float]()
        self._widths = {"step": 2 * len(str(steps)) + 1, **_COLUMNS}

    def header(self, run: str, places: Mapping[str, str]) -> None:
        self._whole_line(Text(f"fp8-grpo run {printable(run)}", style="bold"))
        self._places(places)

    def note(self, text: str) -> None:
        self._whole_line(Text(printable(text)))

    def part(self, name: str) -> Part:
        return Part(name, self.note)

    def step(self, metrics: Mapping[str, float], seconds: float, task_seconds: Mapping[str, float]) -> None:
        """One line for a finished step with the task that took longest; a metric that is absent is shown as "-"."""
        if not self._seconds:
            self._whole_line(Text(_LEGEND, style="dim"))
            if STALENESS in metrics:
                self._widths["age"] = 4
                self._whole_line(Text(_AGE_LEGEND, style="dim"))
        if len(self._seconds) % _HEADER_EVERY == 0:
            self._row({name: name for name in self._widths}, "slowest task")
        self._seconds.append(seconds)
        heldout = Text(f"{MISSING} ")
        if HELDOUT in metrics:
            self._heldout = metrics[HELDOUT]
            heldout = Text(f"{self._heldout:.3f} ")
        elif self._heldout is not None:
            heldout = Text(f"({self._heldout:.3f})", style="dim")
        step = int(metrics[STEP])
        newest = self._seconds[-_HEADER_EVERY:]
        cells: dict[str, str | Text] = {
            "step": f"{step}/{self._steps}",
            "reward": _number(metrics, REWARD, ".3f"),
            "held-out": heldout,
            "length": _number(metrics, LENGTH, ".1f"),
            "tmpe": format_tmpe(metrics[TMPE]) if TMPE in metrics else MISSING,
            "differ": _number(metrics, TOKENS_DIFFERING, ".0f"),
            "seconds": f"{seconds:.2f}",
            "left": clock(sum(newest) / len(newest) * (self._steps - step)),
            "age": _number(metrics, STALENESS, ".2f"),
        }
        slowest = max(task_seconds, key=task_seconds.__getitem__, default=None)
        last = MISSING if slowest is None else f"{printable(slowest)} {task_seconds[slowest] / seconds:.0%}"
        self._row(cells, f"! {last}" if metrics.get(SIGNAL) == 0 else last)

    def sample(self, prompt: str, completion: str, reward: float) -> None:
        """The begin of a prompt, the end of what the policy wrote (it has the answer), and its reward, in a line."""
        asked, written = (printable(" ".join(text.split())) for text in (prompt, completion))
        short = Text(asked)
        short.truncate(self._console.width // 3, overflow="ellipsis")
        begin = Text.assemble(("  wrote  ", "dim"), short, " -> ")
        rewarded = Text(f"  reward {reward:.3g}", style="dim")
        backwards = Text(written[::-1])
        backwards.truncate(self._console.width - begin.cell_len - rewarded.cell_len, overflow="ellipsis")
        self._console.print(begin + Text(backwards.plain[::-1]) + rewarded, no_wrap=True)

    def summary(
        self, summary: Summary, folder: Path, ui_command: str | None, page: str, learning: str = MISSING
    ) -> None:
        """The result in a panel, then its diagnosis, and where everything is."""
        results = Table.grid(padding=(0, 2))
        for name, value, words in _results(summary, learning):
            # A bracket in a string is markup to rich.
            results.add_row(Text(printable(name)), value, Text(printable(words)), style="bold" * (name == "result"))
        title = Text(f"{printable(summary.run)}: done")
        self._console.print(Panel(results, title=title, title_align="left", expand=False))
        if summary.diagnosis is not None:
            self._whole_line(Text(printable(summary.diagnosis), style="yellow"))
        files = {name: str(folder / file) for name, file in (("report", REPORT), ("curves", CURVES))}
        pages = {"MLflow": page} if ui_command is None else {"MLflow UI": ui_command, "then open": page}
        self._places({**files, **pages, "chain": summary.chain_head})

    def _row(self, cells: Mapping[str, str | Text], slowest: str) -> None:
        numbers = list[Text]()
        for name, width in self._widths.items():
            cell = cells[name]
            text = Text(cell) if isinstance(cell, str) else cell
            text.pad_left(width - len(text))
            numbers.append(text)
        self._console.print(Text(" ").join([*numbers, Text(slowest)]), no_wrap=True, overflow="ellipsis")

    def _places(self, places: Mapping[str, str]) -> None:
        width = max(map(len, places), default=0)
        for label, place in places.items():
            self._whole_line(Text.assemble((f"  {label:<{width}}  ", "dim"), printable(place)))

    def _whole_line(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def _results(summary: Summary, learning: str) -> list[tuple[str, str, str]]:
    edge = f"{summary.reward_edge_steps} steps" if summary.reward_edge_steps > 1 else "step"
    change = _from_to(summary.heldout_first, summary.heldout_last)
    tmpe = MISSING if summary.tmpe_max is None else format_tmpe(summary.tmpe_max)
    compared = ComparedTokens(summary.tokens_compared, summary.tokens_compared_share)
    crossed = summary.bounds_crossed
    judged = MISSING if crossed is None else f"crossed {counted(crossed, 'time')}" if crossed else "kept"
    total = summary.seconds["total"]
    rows = [
        ("result", learning, f"held-out {change}"),
        ("reward", _from_to(summary.reward_first10, summary.reward_last10), f"mean of the first and last {edge}"),
        ("held-out", change, "accuracy on unseen prompts, first and last"),
        ("tmpe", tmpe, f"largest of all steps; {summary.tokens_differing:,} differ of {compared.words}"),
        ("bounds", judged, summary.bounds),
        ("time", f"{total:.1f} s", f"of all processes, {counted(summary.steps, 'step')}"),
    ]
    if (gap := summary.precision_gap) is not None:
        words = f"nats a token at step 0; held-out {gap.difference_words}"
        rows.insert(4, ("FP8 from BF16", f"{gap.kl:.3g}", words))
    if (overhead := summary.overhead_ms_per_step) is not None:
        rows.insert(-1, ("overhead", f"{overhead.median:.0f} ms", f"median per step; mean {overhead.mean:.0f} ms"))
    for task, seconds in summary.seconds.items():
        if task != "total" and seconds >= _LEAST_SHARE_SHOWN * total:
            rows.append((f"  {task}", f"{seconds:.1f} s", f"{seconds / total:.0%}"))
    return rows


def shows_sample(step: int, steps: int) -> bool:
    """True for a step whose completion is shown: the first, so that a late one has an early one beside it, and last."""
    return step in (1, steps) or step % SAMPLE_EVERY == 0


def _number(metrics: Mapping[str, float], key: str, form: str) -> str:
    return format(metrics[key], form) if key in metrics else MISSING


def _from_to(first: float | None, last: float | None) -> str:
    return MISSING if first is None or last is None else f"{first:.3f} -> {last:.3f}"
