"""One training in this process, from opening its folder to telling MLflow how it ended.

`open_session` yields the live parts and makes sure that what is committed is published, that the folder's lock is
freed, and that MLflow shows how the training ended, whatever ended it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.report.console import Console
from fp8core.report.summary import StepTiming
from fp8core.store.ledger import START
from fp8core.store.run_directory import RunDirectory
from fp8core.workers.live import LiveRun
from tasks.bounds import TrainingPaused
from tasks.execute import Interval, TaskResult
from tasks.loop import next_step
from tasks.opening import open_directory, open_run, plan_of
from tasks.outage import Outage, store_errors
from tasks.publisher import Publisher, publishing
from tasks.restore import ensure
from tasks.tracking import Tracker
from tasks.tracking_record import RunOutcome, TrackingFile, TrackingRecord, read_record, record_lock
from tasks.tracking_store import is_missing, resolve_tracking_uri

_PUBLISHED_KINDS = {"metrics", "prompts", "rollouts", "rewards"}


@dataclass
class Session:
    """The live run, its MLflow run, what writes to it, and the clock readings of this process."""

    run: LiveRun
    tracker: Tracker
    publisher: Publisher
    began: float
    timings: list[StepTiming] = field(default_factory=list)
    stages: dict[str, Interval] = field(default_factory=dict)

    def stage(self, name: str, result: TaskResult) -> None:
        """Note when a task ran that belongs to no iteration."""
        self.stages[name] = result.interval


def follow_ledger(session: Session) -> None:
    """Let MLflow follow the ledger, now that what an earlier process did not publish can be read."""
    run = session.run
    for index in range(max(START, session.publisher.published + 1), next_step(run)):
        ensure(run, index, _PUBLISHED_KINDS)
    session.publisher.follow_ledger()


@contextmanager
def open_session(config: RunConfig, name: str, console: Console, *, new_code: bool = False) -> Iterator[Session]:
    """Open a new or an existing run (arguments and errors: `opening.open_directory` and `opening.open_run`).

    A new run needs its tracking store from the start; one that MLflow knows goes on without, and publishes later.
    MLflow shows a run that was opened and failed as FAILED, one that was stopped or paused as KILLED.
    """
    began = time.perf_counter()
    plan = plan_of(config)
    with open_directory(config, name, new_code=new_code) as directory:
        tracker, file = _open_tracker(directory, config, name)
        console.header(name, {"folder": str(directory.path), "MLflow": tracker.uri})
        try:
            with open_run(config, plan, directory, console) as run, publishing(run, tracker, file) as publisher:
                yield Session(run, tracker, publisher, began)
        except BaseException as error:
            # Others: Ctrl-C, SIGTERM, a cancelled flow run.
            failed = isinstance(error, Exception) and not isinstance(error, TrainingPaused)
            with suppress(UserError):  # A full disk, say; `error` was first.
                _conclude(tracker, file, "FAILED" if failed else "KILLED", str(error) if failed else None)
            raise
        _conclude(tracker, file, "FINISHED", None)
        if missing := _missing(directory, file):
            console.note(f"MLflow does not answer, {missing} will follow: fp8-grpo resume {name}")


def _open_tracker(directory: RunDirectory, config: RunConfig, name: str) -> tuple[Tracker, TrackingFile]:
    """The MLflow run that this folder names, else the one that has its tag, else a new one.

    Where no store is configured, the one that the folder names is gone on with.
    """
    with record_lock(directory.path):
        known = read_record(directory.path)
    stays = config.tracking.uri is None and known is not None and not is_missing(known.uri)
    uri = known.uri if stays else resolve_tracking_uri(config.tracking.uri, config.runs)
    if known is not None and known.uri == uri:
        tracker, record = Tracker(uri, known.experiment_id, known.run_id), known.running()
    else:
        description = directory.description()
        assert description is not None, "an open folder has its run.json"
        tracker = Tracker.open(uri, config.tracking.experiment, name, config.runs, description.id)
        record = TrackingRecord.begun(uri, tracker.experiment_id, tracker.run_id)
    with suppress(Outage), store_errors(uri):  # During an outage the publisher does this when it is over.
        tracker.resume()
        record = record.changed(told=True)
    return tracker, TrackingFile(directory.path, record)


def _conclude(tracker: Tracker, file: TrackingFile, status: RunOutcome, error: str | None) -> None:
    """Note how the training ended and tell MLflow, which during an outage hears it when the run is opened again."""
    record = file.ended(status, error)
    assert record.ended_ms is not None, "it has ended"
    with suppress(Outage), store_errors(tracker.uri):
        tracker.finish(status, error, record.ended_ms)
        file.told()


def _missing(directory: RunDirectory, file: TrackingFile) -> str | None:
    """What MLflow does not have of an ended training, in words."""
    last, published = directory.ledger.last_step(), file.record.published
    if last is not None and published < last:
        return f"steps {published + 1} to {last}" if published + 1 < last else f"step {last}"
    return None if file.record.told else "how the run ended"
