"""A run step by step, as rows of text."""

import math
from collections import defaultdict

from fp8core.report.chart import short
from fp8core.report.console import format_tmpe
from fp8core.report.run_data import RunData
from fp8core.report.summary import MISSING
from fp8core.store.ledger import START, BoundEntry, CheckpointEntry
from fp8core.store.metrics import HELDOUT, REWARD, SIGNAL, STEP, TMPE

COLUMNS = ("step", "reward", "held-out", "error a token", "groups with a signal", "seconds of tasks", "event")
MOST_ROWS = 400


def step_rows(run: RunData) -> list[tuple[str, ...]]:
    """A row for each step, as `COLUMNS`; of a long run every second one or fewer, those with an event included."""
    events = _events(run)
    stride = math.ceil(len(run.history) / MOST_ROWS)
    rows = []
    for place, row in enumerate(run.history):
        step = int(row[STEP])
        if place % stride and step not in events and place + 1 < len(run.history):
            continue
        numbers = [short(row[name]) if name in row else MISSING for name in (REWARD, HELDOUT)]
        error = format_tmpe(row[TMPE]) if TMPE in row else MISSING
        signal = f"{row[SIGNAL]:.0%}" if SIGNAL in row else MISSING
        seconds = short(run.busy[step]) if step in run.busy else MISSING
        rows.append((str(step), *numbers, error, signal, seconds, ", ".join(events.get(step, []))))
    return rows


def _events(run: RunData) -> dict[int, list[str]]:
    events = defaultdict[int, list[str]](list)
    for _, entry in run.view.entries:
        match entry:
            case CheckpointEntry() if entry.step > START:
                events[entry.step].append("checkpoint")
            case BoundEntry():
                events[entry.step].append(f"{entry.reason}; {entry.action}")
            case _:
                pass
    return events
