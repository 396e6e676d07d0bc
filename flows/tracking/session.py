"""One training in this process, from opening its folder to its final status in each tracking service."""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from flows.tracking.backlog import Backlog, write_report
from flows.tracking.record import RecordFile, RunOutcome, ServiceRecord
from flows.tracking.tracker import Outage, Tracker, Training, find_tracker
from fp8core.config.run import RunConfig, resume_command
from fp8core.errors import UserError, first_line, without_passwords
from fp8core.report.console import Console
from fp8core.report.run_data import REPORT
from fp8core.run.context import RunContext
from fp8core.run.loop import TrainingPaused
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of
from fp8core.store.run_directory import RunDirectory

# Pause between attempts.
RETRY_SECONDS = 2.0
# Longest wait of a finished training for a service that does not answer, and of one that failed or was stopped.
OUTAGE_PATIENCE_SECONDS, STOPPED_PATIENCE_SECONDS = 60.0, 5.0
# A report that took a second is not rewritten before this many seconds have passed.
REPORT_PAUSE = 20.0


class Publisher:
    """A thread that mirrors a run's ledger to one service until `end`; the training never waits for it."""

    def __init__(self, backlog: Backlog, console: Console) -> None:
        self.backlog = backlog
        self._title, self._console = backlog.tracker.title, console
        self._news, self._close_event = threading.Event(), threading.Event()
        self._deadline = float("inf")
        """Time (monotonic) of the last attempt after the training ended."""
        self._has_stopped = False
        self._news.set()  # An earlier process may have left something.
        self._life: Future[None] = ThreadPoolExecutor(1, f"publisher of {self._title}").submit(self._follow)

    def wake(self) -> None:
        """Something was committed. Raises UserError: the run cannot be published."""
        self._news.set()
        if self._life.done():
            self._life.result()

    def close(self) -> None:
        """Let it publish the rest, and wait for a service that is away no longer than its patience."""
        self._end(OUTAGE_PATIENCE_SECONDS)

    def stop(self, patience: float) -> None:
        """Let it publish for some seconds more: the training failed or was stopped."""
        self._has_stopped = True
        self._end(patience)

    def _end(self, patience: float) -> None:
        self._deadline = time.monotonic() + patience
        self._close_event.set()
        self._news.set()

    def wait(self) -> BaseException | None:
        """The reason for which the run cannot be published; waits for the end of the thread."""
        return self._life.exception()

    def _follow(self) -> None:
        away = False
        while True:
            self._news.wait()
            self._news.clear()
            last = self._close_event.is_set()
            try:
                for _ in self.backlog.publish():
                    if self._has_stopped and time.monotonic() > self._deadline:
                        return
            except Outage as error:
                if not away:
                    away = True
                    self._console.note(
                        f"{self._title} does not answer ({error}); metrics stay in the ledger and follow"
                    )
                if last and (self._has_stopped or time.monotonic() + RETRY_SECONDS > self._deadline):
                    return
                # A training that ends is heard of during the pause.
                (time.sleep if last else self._close_event.wait)(RETRY_SECONDS)
                self._news.set()
                continue
            if away:
                away = False
                self._console.note(f"{self._title} answers again; it has every step up to {self.backlog.published}")
            if last:
                return


class LiveReport:
    """The report of a training under way, which a thread rewrites from the first step on."""

    def __init__(self, run: RunContext, publishers: list[Publisher]) -> None:
        self._run, self._publishers = run, publishers
        self._thread = ThreadPoolExecutor(1, "report")
        self._writing: Future[None] | None = None
        self._pause_end = 0.0

    def wake(self) -> None:
        """A step was committed."""
        if self._writing is not None and self._writing.done() and (error := self._writing.exception()) is not None:
            self._run.console.note(f"report: not rewritten before the end ({first_line(error)})")
            self._writing = None
            self.close()
        if (self._writing is None or self._writing.done()) and time.monotonic() > self._pause_end:
            self._writing = self._thread.submit(self._write)

    def close(self) -> None:
        """Nothing is written from now on."""
        self._pause_end = float("inf")
        self._thread.shutdown()

    def _write(self) -> None:
        began = time.monotonic()
        report = write_report(self._run)
        for publisher in self._publishers:
            publisher.backlog.add_report(report)
            publisher.wake()
        self._pause_end = max(self._pause_end, began + (1 + REPORT_PAUSE) * (time.monotonic() - began))


@dataclass
class Session:
    run: RunContext
    trackers: Mapping[str, Tracker]
    """By their names in `tracking.services`."""
    publishers: list[Publisher]
    report: LiveReport
    overheads: list[float] = field(default_factory=list)
    """Milliseconds outside of tasks, of each step of this process."""

    @property
    def pages(self) -> dict[str, str]:
        """Title of a service -> address of the run there."""
        return {each.title: each.page for each in self.trackers.values() if each.page is not None}

    def follow_ledger(self) -> None:
        """The files of committed steps can be read from now on."""
        for publisher in self.publishers:
            publisher.backlog.follow_ledger()
        self.wake()

    def add_result(self) -> None:
        """Picture, summary and report are in the run's folder, and nothing more will be committed."""
        for publisher in self.publishers:
            publisher.backlog.add_result()
        self.wake()

    def wake(self) -> None:
        """Something was committed. Raises UserError: the run cannot be published."""
        for publisher in self.publishers:
            publisher.wake()

    def fail(self, error: str) -> None:
        """Write a report with the reason, and let it be published. Nothing is there to report before step 0."""
        if self.run.directory.ledger.last_step() is None:
            return
        with suppress(UserError):  # A full disk, say; `error` was first.
            report = write_report(self.run, error)
            for publisher in self.publishers:
                publisher.backlog.add_report(report)

    def wait(self) -> None:
        """Wait for publishers that were ended. Raises as `wake`."""
        try:
            problems = [publisher.wait() for publisher in self.publishers]
        except BaseException:  # Ctrl-C ends the wait.
            for publisher in self.publishers:
                publisher.stop(patience=0.0)
            raise
        for problem in filter(None, problems):
            raise problem


@contextmanager
def open_session(
    config: RunConfig, name: str, console: Console, links: Mapping[str, str], *, new_code: bool = False
) -> Iterator[Session]:
    """Open a new or an existing run (arguments and errors: `run.open.open_directory` and `run.open.open_run`).

    A new run needs its tracking services from the start; one that a service has goes on without, and publishes later.
    `links` are shown at the start, with those of the services.
    """
    graph = graph_of(config)
    with open_directory(config, name, new_code=new_code) as directory:
        file = RecordFile(directory.path)
        trackers = _open_trackers(directory, config, name, file)
        places = {"folder": str(directory.path), "report": str(directory.path / REPORT)}
        for tracker in trackers.values():
            places |= tracker.links()
        console.section(f"fp8-grpo run {name}", [], {**places, **links})
        try:
            with open_run(config, graph, directory, console) as run:
                backlogs = [Backlog(run, service, tracker, file) for service, tracker in trackers.items()]
                publishers = [Publisher(backlog, console) for backlog in backlogs]
                with _publishing(Session(run, trackers, publishers, LiveReport(run, publishers))) as session:
                    yield session
        except BaseException as error:
            # Others: Ctrl-C, SIGTERM, a cancelled flow run.
            has_failed = isinstance(error, Exception) and not isinstance(error, TrainingPaused)
            with suppress(UserError):  # A full disk, say; `error` was first.
                _conclude(file, trackers, "FAILED" if has_failed else "KILLED", str(error) if has_failed else None)
            raise
        problems = _conclude(file, trackers, "FINISHED", None)
        for service, tracker in trackers.items():
            if missing := _missing_steps(directory, file.record.services[service]):
                reason = problems.get(service, f"{tracker.title} lacks them")
                console.note(f"{reason}; {missing} will follow: {resume_command(config, name)}")


@contextmanager
def _publishing(session: Session) -> Iterator[Session]:
    try:
        yield session
    except BaseException as error:
        session.report.close()
        try:
            if isinstance(error, Exception):  # Others stop a training that is continued later; its user waits.
                session.fail(without_passwords(first_line(error)))
        finally:  # Python waits at its exit for a thread that still follows the ledger.
            for publisher in session.publishers:
                publisher.stop(STOPPED_PATIENCE_SECONDS)
        with suppress(UserError):  # The user sees only the error that failed or stopped the training.
            session.wait()
        raise
    for publisher in session.publishers:
        publisher.close()
    session.wait()


def _open_trackers(directory: RunDirectory, config: RunConfig, name: str, file: RecordFile) -> dict[str, Tracker]:
    described = directory.description()
    assert described is not None, "an open folder has its run.json"
    training = Training(config, name, described.id, directory.path.absolute(), described.tracking_uri)
    trackers = {
        service: find_tracker(service).open(training, file.record.services.get(service))
        for service in config.tracking.services
    }
    # Not before: a service that refuses leaves the outcome that another has not heard of.
    file.change(status="RUNNING", error=None, ended_ms=None)
    for service, tracker in trackers.items():
        known = file.record.services.get(service)
        if known is None or tracker.run_id != known.run_id:
            known = ServiceRecord(uri=tracker.uri, experiment_id=tracker.experiment_id, run_id=tracker.run_id)
        published = known.published if tracker.published is None else min(known.published, tracker.published)
        fields = {**known.model_dump(), "uri": tracker.uri, "told": False, "published": published}
        file.change_service(service, **fields)
    return trackers


def _conclude(
    file: RecordFile, trackers: Mapping[str, Tracker], status: RunOutcome, error: str | None
) -> dict[str, str]:
    """Record the end of the training, and show it; returns the reason of each service that does not show it."""
    ended_ms = time.time_ns() // 1_000_000
    file.change(status=status, error=error, ended_ms=ended_ms)
    problems = dict[str, str]()
    for service, tracker in trackers.items():
        try:
            tracker.end(status, error, ended_ms)
        except Outage as problem:
            problems[service] = str(problem)
        else:
            file.change_service(service, told=True)
    return problems


def _missing_steps(directory: RunDirectory, known: ServiceRecord) -> str | None:
    last, published = directory.ledger.last_step(), known.published
    if last is not None and published < last:
        return f"steps {published + 1} to {last}" if published + 1 < last else f"step {last}"
    return None if known.told else "how the run ended"
