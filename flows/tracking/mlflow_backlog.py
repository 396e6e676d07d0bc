"""The part of a training that goes to MLflow: the ledger beyond the cursor in tracking.json, and pieces sent once.

The cursor is compared with MLflow's content when a run is opened and when it ends. A store that was restored from a
backup gets the missing steps again. So does one behind a proxy that confirmed requests and dropped them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import takewhile

from mlflow.entities import Metric
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.utils.validation import MAX_METRICS_PER_BATCH

from flows.tracking.metric_names import seconds_name
from flows.tracking.publish import (
    held_models,
    publish_bound,
    publish_checkpoint,
    publish_description,
    publish_inexact,
    publish_report,
    publish_result,
    publish_step,
)
from flows.tracking.record import TrackingFile, mark_killed_siblings
from flows.tracking.store import Lost, store_errors
from flows.tracking.tracker import Tracker, refuse_other_chain
from fp8core.run.commit import stored_manifest
from fp8core.run.context import RunContext
from fp8core.store.checkpoints import last_written
from fp8core.store.ledger import START, BoundEntry, CheckpointEntry

# Longest wait of a finished training for an MLflow that does not answer.
OUTAGE_PATIENCE_SECONDS = 60.0
# A day's worth at MLflow's interval of ten seconds; then the oldest go.
_WAITING_SAMPLES = 8640


class MlflowBacklog:
    """A run's data to publish to MLflow (`session.Destination`)."""

    name = "MLflow"
    outage_note = "metrics stay in the ledger and follow"

    def __init__(self, run: RunContext, tracker: Tracker, file: TrackingFile) -> None:
        self.patience = OUTAGE_PATIENCE_SECONDS
        self._run = run
        self._tracker = tracker
        self._file = file
        self._load = system_load(run, tracker)
        self._sound = False
        self._bound: BoundEntry | None = None
        self._inexact = False
        self._last: deque[Callable[[], None]] = deque()
        self._once: deque[Callable[[], None]] = deque(
            [
                lambda: publish_description(run, tracker),
                lambda: mark_killed_siblings(run.directory.path, tracker.uri),
            ]
        )
        self._models = dict[int, str | None]()
        self._lost_models = set[int]()
        self._comparisons: deque[Callable[[], None]] = deque()

    @property
    def published(self) -> int:
        """The last step up to which MLflow holds all; -1: none."""
        return self._file.record.published

    def follow_ledger(self) -> None:
        """The files of committed steps can be read from now on."""
        if self.published >= START:
            self._once.append(self._send_again)
        self._sound = True

    def add_report(self, on_step: Callable[[], None], error: str) -> None:
        """The training failed or was paused: its report follows what is committed (arguments: `publish_report`)."""
        self._last.append(lambda: publish_report(self._run, self._tracker, on_step, error))

    def add_result(self) -> None:
        """Picture, summary and report are in the run's folder, and nothing more will be committed."""
        self._last.append(lambda: publish_result(self._run, self._tracker))
        self._comparisons.append(self._confirm)

    def publish(self) -> Iterator[None]:
        with store_errors(self._tracker.uri):
            self._sample()
            for _ in self._pieces():
                self._sample()
                yield

    def _pieces(self) -> Iterator[None]:
        if not self._file.record.told:
            refuse_other_chain(self._run.directory, self._tracker)
            self._tracker.resume()
            self._file.told()
            yield
        yield from _work_through(self._once)
        if self._sound:
            yield from self._publish_committed()
            yield from _work_through(self._comparisons)
        yield from _work_through(self._last)
        if self._load is not None:
            self._load.publish(self._tracker)

    def _publish_committed(self) -> Iterator[None]:
        ledger = self._run.directory.ledger
        while ledger.step(step := self.published + 1) is not None:
            publish_step(self._run, self._tracker, step)
            self._file.holds_step(step)
            yield
        crossed = ledger.last_bound()
        if crossed is not None and crossed != self._bound:
            publish_bound(self._tracker, crossed)
            self._bound = crossed
            yield
        # A redo may come at any time: what a later step reads was damaged.
        if not self._inexact and ledger.inexact_steps():
            publish_inexact(self._tracker)
            self._inexact = True
            yield
        held = self._file.record.models
        first = min(self._lost_models, default=math.inf)
        # The newest may be written again, with another policy. Older ones may need the whole ledger.
        newest = takewhile(lambda entry: entry.step >= first or not self._holds(entry), last_written(ledger))
        for entry in reversed(list(newest)):
            if not self._holds(entry):
                publish_checkpoint(self._run, self._tracker, entry)
                self._models[entry.step] = entry.weights_digest
                self._lost_models.discard(entry.step)
                self._file.holds_model(max(held, entry.step))
                yield

    def _send_again(self) -> None:
        """Begin again where MLflow lost something since an earlier process, as by a backup that was restored."""
        if (lost := self._rewind()) is not None:
            self._run.console.note(f"MLflow lost {lost}, which is sent again")

    def _confirm(self) -> None:
        """Raises Lost: MLflow confirmed what it does not hold; the next attempt sends it again."""
        if (lost := self._rewind()) is not None:
            raise Lost(f"tracking.uri {self._tracker.uri}: {lost} was confirmed and is not there")

    def _rewind(self) -> str | None:
        """Prepare to send again what MLflow does not hold; returns the first such thing, in words, or None."""
        upto = self._file.record.models
        sent = [entry for entry in last_written(self._run.directory.ledger) if entry.step <= upto]
        self._models = held_models(self._run, self._tracker) if sent else {}
        self._lost_models = {entry.step for entry in sent if not self._holds(entry)}
        if (step := self._first_lost_step()) is not None:
            self._file.holds_step(step - 1)
            return f"step {step}"
        return f"the model of step {min(self._lost_models)}" if self._lost_models else None

    def _first_lost_step(self) -> int | None:
        """The first step up to the cursor of which MLflow lacks the metrics.

        The metrics of a step arrive in one request, so that the seconds of one task stand for all. Most steps have the
        same tasks: few histories are read.
        """
        held: dict[str, set[int]] = {}
        unseen, lost = set(range(START, self.published + 1)), None
        while unseen:
            step = max(unseen)
            key = seconds_name(min(stored_manifest(self._run, step).observed.timings))
            if key not in held:
                rows = self._tracker.client.get_metric_history(self._tracker.run_id, key)
                held[key] = {row.step for row in rows}
            if step not in held[key]:
                lost = step
            unseen -= held[key] | {step}
        return lost

    def _holds(self, entry: CheckpointEntry) -> bool:
        """True if MLflow holds a checkpoint as a model, or a user deleted that."""
        return entry.step in self._models and self._models[entry.step] in (None, entry.weights_digest)

    def caught_up(self) -> str:
        return f"; it has every step up to {self.published}"

    @property
    def idle_seconds(self) -> float | None:
        return None if self._load is None else self._load.interval

    def _sample(self) -> None:
        if self._load is not None:
            self._load.sample()


def _work_through(pieces: deque[Callable[[], None]]) -> Iterator[None]:
    """Publishes the pieces that are published once; one that fails stays in the queue."""
    while pieces:
        pieces[0]()
        pieces.popleft()
        yield


def system_load(run: RunContext, tracker: Tracker) -> "SystemLoad | None":
    if not run.config.tracking.system_metrics:
        return None
    description = run.directory.description()
    assert description is not None, "an open run has its run.json"
    return SystemLoad(tracker, description.created)


class SystemLoad:
    """Samples of one process. Their step is the training's age in seconds, which no two processes share."""

    def __init__(self, tracker: Tracker, created: str) -> None:
        self._monitor = SystemMetricsMonitor(tracker.run_id, tracking_uri=tracker.uri)
        self._created = datetime.fromisoformat(created).timestamp()
        self._waiting: deque[list[Metric]] = deque(maxlen=_WAITING_SAMPLES)
        self._collect()  # The first sample of a CPU's load is void: the load is measured since the sample before.
        self._due = time.monotonic() + self.interval

    @property
    def interval(self) -> float:
        """Seconds between samples: MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL, else MLflow's default; one at least."""
        return max(1.0, float(self._monitor.sampling_interval))

    def sample(self) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self.interval
        values, now = self._collect(), time.time()
        rows = [
            Metric(f"system/{key}", value, int(1000 * now), int(now - self._created)) for key, value in values.items()
        ]
        self._waiting.append(rows)

    def publish(self, tracker: Tracker) -> None:
        """Send what waits, as many samples a request as MLflow takes; sent samples are dropped after the answer."""
        while self._waiting:
            count = max(1, MAX_METRICS_PER_BATCH // max(1, len(self._waiting[0])))
            batch = [self._waiting[i] for i in range(min(count, len(self._waiting)))]
            tracker.log_metrics([row for rows in batch for row in rows])
            for _ in batch:
                self._waiting.popleft()

    def _collect(self) -> dict[str, float]:
        self._monitor.collect_metrics()
        values: dict[str, float] = self._monitor.aggregate_metrics()
        for part in self._monitor.monitors:
            part.clear_metrics()
        return values
