"""One training in this process, from opening its folder to closing its MLflow run.

`open_session` yields the live parts and makes sure that the folder's lock is freed and that MLflow shows how the
training ended, whatever ended it.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fp8core
import tasks
from fp8core.config.capability import check_contract
from fp8core.config.check import Plan, check_pipeline
from fp8core.config.load import config_digest, may_continue
from fp8core.config.run import RunConfig, public_dump
from fp8core.config.steps import import_spec
from fp8core.data.source import build_source
from fp8core.errors import UserError
from fp8core.report.console import Console
from fp8core.report.graph import pipeline_mermaid, pipeline_text
from fp8core.report.summary import StepTiming
from fp8core.rewards.verifier import build_verifier
from fp8core.rl.objective import Objective
from fp8core.store.ledger import SegmentEntry
from fp8core.store.run_directory import RunDescription, RunDirectory, read_description
from fp8core.store.versions import code_version, git_state, hardware
from fp8core.workers.build import build_base
from fp8core.workers.live import LiveRun, register, release
from tasks.commit import publish_step
from tasks.execute import Interval, TaskResult
from tasks.tracking import RunOutcome, Tracker, resolve_tracking_uri

CARRIED_KINDS = {"policy": "policy", "scales": "scales"}
_TRACKING = "tracking.json"
_PACKAGES = tuple(Path(str(package.__file__)).parent for package in (fp8core, tasks))


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


def plan_of(config: RunConfig) -> Plan:
    """The checked pipeline of a configuration whose precision contract can be kept.

    Raises:
        UserError: the contract is beyond the engines, the correction names what does not exist, the pipeline is
            broken, or nothing in it provides metrics or the log-probs that the loss asks for.
    """
    # The embedded engine and the torch trainer compute on the CPU, whatever else the machine has.
    check_contract(config.precision, "cpu", corrected=config.correction.method != "none")
    Objective(config.loss, config.correction)
    plan = check_pipeline(config.pipeline, CARRIED_KINDS, import_spec)
    if not any("metrics" in planned.spec.outputs.values() for planned in plan.steps):
        raise UserError("pipeline.steps: no step provides an artifact of kind metrics; add tasks.record:record")
    if config.loss.reference_kl and not any("reference" in planned.inputs for planned in plan.steps):
        raise UserError(
            f"loss.reference_kl={config.loss.reference_kl} needs log-probs of the reference policy: insert the step "
            "tasks.reference:reference, and rewire train: {reference: reference} (as configs/careful.yaml does)"
        )
    return plan


def refuse_conflict(config: RunConfig) -> None:
    """Refuse a named run that exists with another configuration or code, before anything is started.

    Raises:
        UserError: with every key that differs.
    """
    if config.run is not None:
        described = read_description(config.runs.absolute() / config.run)
        if described is not None:
            refuse_other_run(described, config, code_version(*_PACKAGES), config.run)


def refuse_other_run(described: RunDescription, config: RunConfig, version: str, name: str) -> None:
    """A run is continued as it was begun, but for more steps; by the code that began it, or digests mean nothing."""
    differing = may_continue(described.config, public_dump(config))
    if differing:
        raise UserError(f"run {name} exists with another configuration: {'; '.join(differing)}")
    if described.code_version != version:
        raise UserError(
            f"run {name} was made by code version {described.code_version[:12]}, this is {version[:12]}: "
            "continue it with that code, or start a new run with --set run=NAME"
        )


@contextmanager
def open_session(config: RunConfig, name: str, console: Console) -> Iterator[Session]:
    """Open a new or an existing run.

    Args:
        config: the checked configuration.
        name: the run's name, which is that of its folder below `config.runs`.
        console: where a person watches.

    Raises:
        UserError: the folder is unwritable or in use, the run exists with another configuration or code, or the
            model or data cannot be read. MLflow shows a run that was opened and failed as FAILED.
    """
    began = time.perf_counter()
    plan = plan_of(config)
    directory = RunDirectory.create_or_open(config.runs.absolute() / name)
    try:
        version = _describe(directory, config, name)
        tracker = _open_tracker(directory, config, name)
    except BaseException:
        directory.close()
        raise
    console.header(name, {"folder": str(directory.path), "MLflow": tracker.uri})
    status: RunOutcome = "KILLED"  # Ctrl-C, SIGTERM, a cancelled flow run
    try:
        run = _live(config, plan, directory, version, console)
        register(run)
        _log_description(run, tracker)
        yield Session(run, tracker, began)
        status = "FINISHED"
    except Exception as error:
        status = "FAILED"
        tracker.log_error(str(error))
        raise
    finally:
        release(directory.path)
        directory.close()
        tracker.finish(status)


def catch_up(session: Session) -> None:
    """Log to MLflow what was committed by an earlier process and never reached it."""
    logged = session.tracker.logged_steps()
    for index in sorted(session.run.directory.ledger.steps()):
        if index + 1 not in logged:
            publish_step(session.run, session.tracker, index)


def _describe(directory: RunDirectory, config: RunConfig, name: str) -> str:
    """Write run.json, or compare it with this configuration and code; returns the code version."""
    version = code_version(*_PACKAGES)
    described = directory.description()
    if described is None:
        directory.write_description(public_dump(config), version)
    else:
        refuse_other_run(described, config, version, name)
    return version


def _open_tracker(directory: RunDirectory, config: RunConfig, name: str) -> Tracker:
    """Start an MLflow run, or continue the one this folder names."""
    path = directory.path / _TRACKING
    uri = resolve_tracking_uri(config.tracking.uri, config.runs)
    known = json.loads(path.read_text()) if path.exists() else None
    resumed = known["run_id"] if known is not None and known["uri"] == uri else None
    tracker = Tracker.open(uri, config.tracking.experiment, name, config.runs, resumed)
    directory.write_text(_TRACKING, json.dumps({"uri": uri, "run_id": tracker.run_id}) + "\n")
    return tracker


def _live(config: RunConfig, plan: Plan, directory: RunDirectory, version: str, console: Console) -> LiveRun:
    source = build_source(config.data, config.evaluation)  # Before the model, which takes longer to load.
    base = build_base(config)
    segment = SegmentEntry(pid=os.getpid(), host=socket.gethostname(), code_version=version, started=time.time())
    directory.ledger.append(segment)
    return LiveRun(
        config=config,
        config_digest=config_digest(config),
        code_version=version,
        plan=plan,
        directory=directory,
        tokenizer=base.tokenizer,
        arch=base.arch,
        source=source,
        verifier=build_verifier(config.reward),
        model_revision=base.revision,
        machine=hardware(),
        git=git_state(_PACKAGES[0]),
        console=console,
        base=base.tensors,
    )


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
