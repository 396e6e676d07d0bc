"""System metrics of a training: CPU, memory, disk, network and GPUs, as MLflow's own monitor names them.

MLflow's `SystemMetricsMonitor` collects; its thread is not started, for it ends at the first request that fails, and
joining it waits for a request. Samples are taken and sent by the publisher instead, and wait here during an outage.
"""

import time
from collections import deque
from datetime import datetime

from mlflow.entities import Metric
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.utils.validation import MAX_METRICS_PER_BATCH

from fp8core.workers.live import LiveRun
from tasks.tracking import Tracker

# A day's worth at MLflow's interval of ten seconds; then the oldest go.
_WAITING_SAMPLES = 8640


def system_load(run: LiveRun, tracker: Tracker) -> "SystemLoad | None":
    """The samples of this process; None where the configuration wants none."""
    if not run.config.tracking.system_metrics:
        return None
    description = run.directory.description()
    assert description is not None, "an open run has its run.json"
    return SystemLoad(tracker, description.created)


class SystemLoad:
    """Samples of one process. Their step is the second of the training's life, which no two processes share."""

    def __init__(self, tracker: Tracker, created: str) -> None:
        """`created` is the ISO time in run.json."""
        self._monitor = SystemMetricsMonitor(tracker.run_id, tracking_uri=tracker.uri)
        self._created = datetime.fromisoformat(created).timestamp()
        self._waiting: deque[list[Metric]] = deque(maxlen=_WAITING_SAMPLES)
        self._collect()  # The first look at a CPU's load says nothing: it is that since the look before.
        self._due = time.monotonic() + self.interval

    @property
    def interval(self) -> float:
        """Seconds between samples: MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL, else MLflow's default; one at least."""
        return max(1.0, self._monitor.sampling_interval)

    def sample(self) -> None:
        """Take a sample when one is due."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self.interval
        values, now = self._collect(), time.time()
        rows = [
            Metric(f"system/{key}", value, int(1000 * now), int(now - self._created)) for key, value in values.items()
        ]
        self._waiting.append(rows)

    def publish(self, tracker: Tracker) -> None:
        """Send what waits, as many samples a request as MLflow takes; what was sent is forgotten after the answer."""
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
