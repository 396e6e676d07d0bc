"""Prefect's view of a training beside its tasks: progress, a report, and a link to its MLflow run.

The thread that serves MLflow posts them (`session.Destination`). Nothing here fails a training.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.tracking.store import Outage
from fp8core.errors import UserError, first_line
from fp8core.report.summary import STEP
from fp8core.report.text import progress_markdown
from fp8core.run.commit import step_metrics
from fp8core.run.context import RunContext
from fp8core.store.ledger import START

# Longest wait of a finished training for a server that does not answer, and for one answer at any time.
PATIENCE_SECONDS = 5.0
_PASSING_STATUS = {408, 429}


class PrefectArtifacts:
    """The artifacts of a run that belong to a flow run (`session.Destination`)."""

    name = "Prefect"
    follows = "what its UI shows of the run follows"
    idle_seconds = None

    def __init__(self, run: RunContext, page: str, flow_run: str | None, client: SyncPrefectClient) -> None:
        """`page` is the address of the MLflow run, `client` that of `artifact_client`."""
        self.patience = PATIENCE_SECONDS
        self._run, self._flow_run, self._client = run, flow_run, client
        self._key = re.sub(r"[^a-z0-9]+", "-", run.directory.path.name.lower()).strip("-")
        self._done = run.directory.ledger.last_step() or START
        self._shown: int | None = None
        self._progress: UUID | None = None
        self._waiting: deque[Callable[[], None]] = deque([partial(self._post_link, page)])

    def step_done(self, index: int) -> None:
        """A step is committed; every `tracking.report_every` steps, and after the last one, a report is due."""
        self._done = index
        every, last = self._run.config.tracking.report_every, self._run.config.steps
        if index % every == 0 or index == last:
            self._waiting.append(partial(self._post_report, index))

    def publish(self) -> Iterator[None]:
        """Posts what waits (`session.Destination.publish`); a piece that is refused is left out."""
        while (done := self._done) != self._shown:
            self._try(partial(self._post_progress, done))
            self._shown = done
            yield
        while self._waiting:
            self._try(self._waiting[0])
            self._waiting.popleft()
            yield

    def _try(self, piece: Callable[[], None]) -> None:
        try:
            # One attempt: the publisher makes the next ones, and serves MLflow between them.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                piece()
        except (httpx.HTTPError, PrefectException, OSError, UserError, ValueError) as error:
            if _passes(error):
                raise Outage(first_line(error)) from error
            self._run.console.note(f"left out of what Prefect shows: {first_line(error)}")

    def caught_up(self) -> str:
        """Nothing that is worth a word."""
        return ""

    def _create(self, kind: str, name: str, data: object, words: str) -> UUID:
        request = ArtifactCreate(
            type=kind, key=f"{name}-{self._key}", description=words, data=data, flow_run_id=self._flow_run
        )
        return self._client.create_artifact(request).id

    def _post_link(self, page: str) -> None:
        self._create("markdown", "mlflow", f"[MLflow run]({page})", "Metrics, models and files of this training.")

    def _post_progress(self, done: int) -> None:
        share = 100.0 * done / self._run.config.steps
        if self._progress is None:
            words = f"Steps of {self._run.directory.path.name}, of {self._run.config.steps}"
            self._progress = self._create("progress", "progress", share, words)
        else:
            self._client.update_artifact(self._progress, ArtifactUpdate(data=share))

    def _post_report(self, index: int) -> None:
        every, steps = self._run.config.tracking.report_every, self._run.config.steps
        first = max(START + 1, index - every + 1)
        seconds: dict[str, float] = {}
        for step in range(first, index + 1):
            for name, entry in self._run.directory.ledger.tasks(step).items():
                seconds[name] = seconds.get(name, 0.0) + entry.seconds
        rows, before = self._rows(first, index), self._rows(max(START + 1, first - every), first - 1)
        text = progress_markdown(self._run.directory.path.name, steps, rows, before, seconds)
        self._create("markdown", "report", text, f"Step {index} of {steps}")

    def _rows(self, first: int, last: int) -> list[dict[str, float]]:
        return [{STEP: step, **step_metrics(self._run, step)} for step in range(first, last + 1)]


def artifact_client() -> SyncPrefectClient:
    """A client whose requests end soon: while one waits, MLflow gets nothing."""
    return get_client(httpx_settings={"timeout": PATIENCE_SECONDS}, sync_client=True)


def _passes(error: Exception) -> bool:
    """True if a retry may help; a refusal, and metrics that are gone, will be the same."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in _PASSING_STATUS
    return isinstance(error, httpx.HTTPError | OSError)
