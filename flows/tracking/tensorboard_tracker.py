"""One training is one folder `tensorboard/` in the run's folder, also after a resume.

TensorBoard appends events. Every start writes from which step on earlier events do not count (`purge_step`): the first
step that is published after it. So whatever a killed process left of that step, each step counts once.
Texts and tables get the step at which they were published.
"""

import json
import shlex
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

from flows.environment import program
from flows.tracking.record import RunOutcome, ServiceRecord
from flows.tracking.tracker import Outage, Table, Tracker, TrackerEntry, Training
from fp8core.errors import first_line, printable_lines

FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    title = "TensorBoard"

    def __init__(self, folder: Path, run_id: str, next_step: int) -> None:
        self._folder, self.uri, self.run_id = folder, str(folder), run_id
        self._next = next_step
        self._writer: Any = None

    def links(self) -> Mapping[str, str]:
        return {self.title: f"{program('tensorboard')} --logdir {shlex.quote(self.uri)}"}

    def start(self, settings: Mapping[str, object]) -> None:
        with self._writing():
            if self._writer is not None:
                self._writer.close()
            self._writer = SummaryWriter(self.uri, purge_step=self._next)
            # Not `add_hparams`, which writes a file of its own: TensorBoard then reads the first one no further.
            values = {name: _plain(value) for name, value in settings.items()}
            for summary in hparams(values, {}):
                self._writer.file_writer.add_summary(summary, self._next)

    def set_tags(self, tags: Mapping[str, str], note: str | None = None) -> None:
        with self._writing():
            if tags:
                self._add_text("tags", _markdown(Table(("tag", "value"), [*tags.items()])))
            if note is not None:
                self._add_text("note", note)

    def log_step(self, step: int, metrics: Mapping[str, float], committed_ms: int, tags: Mapping[str, str]) -> None:
        with self._writing():
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step, walltime=committed_ms / 1000)
        self._next = step + 1

    def log_artifact(self, place: str, content: str | Path | Table) -> None:
        """Tables and texts; all other files are in the run's folder, beside this one."""
        with self._writing():
            if isinstance(content, Table):
                self._add_text(place.removesuffix(".json"), _markdown(content))
            elif isinstance(content, str) and not place.endswith(".json"):
                self._add_text(place, f"```\n{printable_lines(content)}\n```")

    def end(self, outcome: RunOutcome, error: str | None, ended_ms: int) -> None:
        if self._writer is None:
            return
        with self._writing():
            self._add_text("outcome", printable_lines(outcome if error is None else f"{outcome}: {error}"))
        self._writer.close()
        self._writer = None

    def _add_text(self, tag: str, text: str) -> None:
        self._writer.add_text(tag, text, self._next)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """After the block all is in the file; errors become Outage."""
        try:
            yield
            self._writer.flush()
        except OSError as error:
            raise Outage(f"{self._folder}: {first_line(error)}") from error


def open_tracker(training: Training, service: ServiceRecord | None) -> TensorBoardTracker:
    folder = training.folder / FOLDER
    if service is not None and any(folder.glob("events.out.tfevents.*")):
        return TensorBoardTracker(folder, service.run_id, service.published + 1)
    # Its id is new, so everything is published again where somebody removed the folder.
    return TensorBoardTracker(folder, uuid.uuid4().hex, 0)


TRACKER = TrackerEntry(open_tracker)


def _plain(value: object) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)


def _markdown(table: Table) -> str:
    header = [f"| {' | '.join(table.columns)} |", f"| {' | '.join('---' for _ in table.columns)} |"]
    return "\n".join([*header, *(f"| {' | '.join(map(_cell, row))} |" for row in table.rows)])


def _cell(value: object) -> str:
    return printable_lines(str(value)).replace("|", "\\|").replace("\n", "<br>")
