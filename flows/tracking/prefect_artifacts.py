"""A training's artifacts in Prefect, beside its tasks: progress, a report, and a link to its MLflow run.

A thread posts them, so that the training never waits for Prefect's server. Requests to a server that does not answer
are repeated until it does or the training ends; the console reports it once. Nothing here fails a training.
"""

import contextvars
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException

from flows.tracking.session import Session
from fp8core.errors import UserError, first_line
from fp8core.report.summary import STEP
from fp8core.report.text import progress_markdown
from fp8core.run.commit import step_metrics
from fp8core.run.context import RunContext
from fp8core.store.ledger import START

RETRY_SECONDS = 10.0
# Longest wait at the end of a training for what is not posted yet.
PATIENCE_SECONDS = 5.0
_PASSING_STATUS = {408, 429}

Piece = Callable[[], None]


class RunArtifacts:
    """The thread that posts the artifacts of a run, from construction to `close`; only within a flow run."""

    def __init__(self, run: RunContext, page: str) -> None:
        """`page` is the address of the MLflow run."""
        self._run = run
        self._key = re.sub(r"[^a-z0-9]+", "-", run.directory.path.name.lower()).strip("-")
        self._done = run.directory.ledger.last_step() or START
        self._progress: UUID | None = None
        self._said_so = False
        self._waiting: deque[Piece] = deque([partial(self._post_link, page), self._post_progress])
        self._changed = threading.Condition()
        self._closing = threading.Event()
        # The context names the flow run that the artifacts belong to.
        follow = partial(contextvars.copy_context().run, self._follow)
        self._thread = threading.Thread(target=follow, name="prefect-artifacts", daemon=True)
        self._thread.start()

    def step_done(self, index: int) -> None:
        """A step is committed; every `tracking.report_every` steps, and after the last one, a report is due."""
        self._done = index
        every, last = self._run.config.tracking.report_every, self._run.config.steps
        with self._changed:
            if self._post_progress not in self._waiting:
                self._waiting.append(self._post_progress)
            if index % every == 0 or index == last:
                self._waiting.append(partial(self._post_report, index))
            self._changed.notify()

    def close(self) -> None:
        """Post the rest, but wait no longer than PATIENCE_SECONDS."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._thread.join(PATIENCE_SECONDS)

    def _follow(self) -> None:
        while (piece := self._next()) is not None:
            try:
                piece()
            except (httpx.HTTPError, PrefectException, OSError, UserError) as error:
                if not _passes(error):
                    self._run.console.note(f"left out of what Prefect shows: {first_line(error)}")
                    continue
                self._say_that_it_is_away()
                with self._changed:
                    self._waiting.appendleft(piece)
                if self._closing.wait(RETRY_SECONDS):
                    return
            else:
                self._say_that_it_is_back()

    def _next(self) -> Piece | None:
        """The next piece to post, as soon as there is one; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            return self._waiting.popleft() if self._waiting else None

    def _say_that_it_is_away(self) -> None:
        if not self._said_so:
            self._said_so = True
            self._run.console.note("Prefect does not answer; what its UI shows of the run follows")

    def _say_that_it_is_back(self) -> None:
        if self._said_so:
            self._said_so = False
            self._run.console.note("Prefect answers again")

    def _post_link(self, page: str) -> None:
        create_link_artifact(page, "MLflow run", f"mlflow-{self._key}", "Metrics, models and files of this training.")

    def _post_progress(self) -> None:
        share = 100.0 * self._done / self._run.config.steps
        if self._progress is None:
            words = f"Steps of {self._run.directory.path.name}, of {self._run.config.steps}"
            self._progress = create_progress_artifact(share, f"progress-{self._key}", words)
        else:
            update_progress_artifact(self._progress, share)

    def _post_report(self, index: int) -> None:
        every, steps = self._run.config.tracking.report_every, self._run.config.steps
        first = max(START + 1, index - every + 1)
        seconds: dict[str, float] = {}
        for step in range(first, index + 1):
            for name, entry in self._run.directory.ledger.tasks(step).items():
                seconds[name] = seconds.get(name, 0.0) + entry.seconds
        rows, before = self._rows(first, index), self._rows(max(START + 1, first - every), first - 1)
        text = progress_markdown(self._run.directory.path.name, steps, rows, before, seconds)
        create_markdown_artifact(text, f"report-{self._key}", f"Step {index} of {steps}")

    def _rows(self, first: int, last: int) -> list[dict[str, float]]:
        return [{STEP: step, **step_metrics(self._run, step)} for step in range(first, last + 1)]


@contextmanager
def run_artifacts(session: Session) -> Iterator[RunArtifacts]:
    """The artifacts of a session's run while the block lasts."""
    artifacts = RunArtifacts(session.run, session.tracker.page)
    try:
        yield artifacts
    finally:
        artifacts.close()


def _passes(error: Exception) -> bool:
    """True if a retry may help; a refusal, and metrics that are gone, will be the same."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in _PASSING_STATUS
    return isinstance(error, httpx.HTTPError | OSError)
