"""One training in this process, from opening its folder to closing its MLflow run.

`open_session` yields the live parts and makes sure that the folder's lock is freed and that MLflow shows how the
training ended, whatever ended it.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fp8core.config.run import RunConfig, public_dump
from fp8core.report.console import Console
from fp8core.report.graph import pipeline_mermaid, pipeline_text
from fp8core.report.summary import StepTiming
from fp8core.store.run_directory import RunDirectory
from fp8core.workers.live import LiveRun
from tasks.commit import publish_step
from tasks.execute import Interval, TaskResult
from tasks.opening import open_directory, open_run, plan_of
from tasks.tracking import RunOutcome, Tracker, is_missing, resolve_tracking_uri

_TRACKING = "tracking.json"


@dataclass
class Session:
    """The live run, its MLflow run, and the clock readings of this process."""

    run: LiveRun
    tracker: Tracker
    began: float
    timings: list[StepTiming] = field(default_factory=list)
    stages: dict[str, Interval] = field(default_factory=dict)

    def stage(self, name: str, result: TaskResult) -> None:
        """Note when a task ran that belongs to no iteration."""
        self.stages[name] = result.interval


@contextmanager
def open_session(config: RunConfig, name: str, console: Console, *, new_code: bool = False) -> Iterator[Session]:
    """Open a new or an existing run (arguments and errors: `opening.open_directory` and `opening.open_run`).

    MLflow shows a run that was opened and failed as FAILED, one that was stopped as KILLED.
    """
    began = time.perf_counter()
    plan = plan_of(config)
    with open_directory(config, name, new_code=new_code) as directory:
        tracker = _open_tracker(directory, config, name)
        console.header(name, {"folder": str(directory.path), "MLflow": tracker.uri})
        status: RunOutcome = "KILLED"  # Ctrl-C, SIGTERM, a cancelled flow run
        try:
            with open_run(config, plan, directory, console) as run:
                _log_description(run, tracker)
                yield Session(run, tracker, began)
            status = "FINISHED"
        except Exception as error:
            status = "FAILED"
            tracker.log_error(str(error))
            raise
        finally:
            tracker.finish(status)


def catch_up(session: Session) -> None:
    """Log to MLflow what was committed by an earlier process and never reached it."""
    logged = session.tracker.logged_steps()
    for index in sorted(session.run.directory.ledger.steps()):
        if index not in logged:
            publish_step(session.run, session.tracker, index)


def _open_tracker(directory: RunDirectory, config: RunConfig, name: str) -> Tracker:
    """Start an MLflow run, or continue the one this folder names, in its store unless another is configured."""
    path = directory.path / _TRACKING
    known = json.loads(path.read_text()) if path.exists() else None
    stays = config.tracking.uri is None and known is not None and not is_missing(known["uri"])
    uri = known["uri"] if stays else resolve_tracking_uri(config.tracking.uri, config.runs)
    resumed = known["run_id"] if known is not None and known["uri"] == uri else None
    tracker = Tracker.open(uri, config.tracking.experiment, name, config.runs, resumed)
    directory.write_text(_TRACKING, json.dumps({"uri": uri, "run_id": tracker.run_id}) + "\n")
    return tracker


def _log_description(run: LiveRun, tracker: Tracker) -> None:
    """Parameters, the configuration and the graph: what is known before the first step."""
    tracker.log_params(_flat(public_dump(run.config)))
    tracker.log_dict(public_dump(run.config), "config.yaml")
    tracker.log_text(pipeline_text(run.plan), "graph.txt")
    tracker.log_text(f"```mermaid\n{pipeline_mermaid(run.plan)}\n```\n", "graph.md")
    tracker.set_tags({"code_version": run.code_version, "run_directory": str(run.directory.path)})


def _flat(value: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings as dotted keys; the pipeline stays one value."""
    flat: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(item, dict) and key != "pipeline":
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat
