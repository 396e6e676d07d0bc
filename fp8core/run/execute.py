"""Run one step of one iteration, or take its stored result, whose key is a digest of all that it is a function of."""

import hashlib
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fp8core import durable
from fp8core.alignment.bounds import unverifiable
from fp8core.config.step_graph import PlannedStep
from fp8core.config.steps import import_step
from fp8core.errors import NotRecordedError, UserError, described_error, printable
from fp8core.run.context import RunContext
from fp8core.run.policy import SyncError
from fp8core.run.rollouts import shards_of
from fp8core.store.artifacts import Ref, contents
from fp8core.store.json_text import canonical_json
from fp8core.store.layout import manifest_place
from fp8core.store.ledger import CARRIED_FROM, START, StepEntry, TaskEntry, stored_metrics
from fp8core.store.manifest import (
    StepManifest,
    StepObservations,
    StepRecord,
    library_versions,
    record_digest,
)
from fp8core.store.metrics import STEP, Interval
from fp8core.training.trainer import UpdateError


class StepError(RuntimeError):
    """A task failed without saying why in words for people; `__cause__` is what it raised."""


@dataclass(frozen=True)
class TaskResult:
    """`interval`: when its body ran, perf_counter seconds."""

    entry: TaskEntry
    reused: bool
    interval: Interval


def run_step(run: RunContext, index: int, planned: PlannedStep, inputs: Mapping[str, Ref]) -> TaskResult:
    function = import_step(planned.uses)

    def body() -> dict[str, Ref]:
        outputs = function(run, index, planned.options, **inputs)
        kinds = {port: ref.kind for port, ref in outputs.items()}
        if kinds != dict(planned.spec.outputs):
            raise UserError(f"{planned.uses} returned {kinds}, but declares {dict(planned.spec.outputs)}")
        return {planned.outputs[port]: ref for port, ref in outputs.items()}

    parts = _parts(run, index, planned, inputs)
    if planned.spec.redo and run.ready_trainer().version < index:
        # The trainer does not hold it, whatever is stored. Its inputs were made anew (edited code), and came out equal.
        return _execute(run, index, planned.name, task_key(run, index, planned.name, parts), body)
    return run_task(run, index, planned.name, parts, body)


def finished_steps(run: RunContext, index: int, start: Mapping[str, Ref]) -> list[PlannedStep]:
    stored, artifacts, finished = run.directory.ledger.tasks(index), dict(start), list[PlannedStep]()
    for planned in run.graph.steps:
        if planned.name in stored and artifacts.keys() >= set(planned.inputs.values()):
            inputs = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
            key = task_key(run, index, planned.name, _parts(run, index, planned, inputs))
            if stored[planned.name].key == key and intact(run, stored[planned.name].outputs):
                artifacts |= stored[planned.name].outputs
                finished.append(planned)
    return finished


def intact(run: RunContext, refs: Mapping[str, Ref]) -> bool:
    return all(run.directory.store.is_intact(ref) for ref in refs.values())


def _parts(run: RunContext, index: int, planned: PlannedStep, inputs: Mapping[str, Ref]) -> dict[str, Any]:
    return {
        "uses": planned.uses,
        "module": module_digest(planned.uses.partition(":")[0]),
        "options": planned.options.model_dump(mode="json"),
        "inputs": {port: ref.digest for port, ref in inputs.items()},
        "verifier": run.verifier.describe(),
        **({} if run.loss_source is None else {"loss": run.loss_source}),
        **({"environment": run.environment_description} if run.environment_description else {}),
        # The last step is evaluated, whatever its number; which step is the last one changes with `steps`.
        **({"last": True} if index == run.config.steps and "evaluation" in planned.spec.outputs.values() else {}),
    }


def run_task(
    run: RunContext, index: int, name: str, parts: Mapping[str, Any], body: Callable[[], dict[str, Ref]]
) -> TaskResult:
    """Run `body` and commit its outputs, or take what is stored under the same key; errors name the task."""
    began = time.perf_counter()
    key = task_key(run, index, name, parts)
    stored = run.directory.ledger.tasks(index).get(name)
    committed = run.directory.ledger.step(index) is not None
    if stored is not None and (committed or (stored.key == key and intact(run, stored.outputs))):
        return TaskResult(stored, reused=True, interval=(began, time.perf_counter()))
    return _execute(run, index, name, key, body)


def _execute(run: RunContext, index: int, name: str, key: str, body: Callable[[], dict[str, Ref]]) -> TaskResult:
    began, started = time.perf_counter(), time.time()
    with run.console.part(f"step {index}, {name}"):
        outputs = attempt(f"step {index}, task {name}", body)
    entry = TaskEntry(
        step=index,
        task=name,
        key=key,
        outputs=outputs,
        started=started,
        seconds=time.perf_counter() - began,
    )
    run.directory.ledger.append(entry)
    return TaskResult(entry, reused=False, interval=(began, time.perf_counter()))


def attempt(place: str, body: Callable[[], dict[str, Ref]]) -> dict[str, Ref]:
    try:
        return body()
    except (UserError, UpdateError, SyncError, NotRecordedError) as error:
        raise type(error)(printable(f"{place}: {error}")) from error
    except Exception as error:
        raise StepError(printable(f"{place}: {described_error(error)}")) from error


def task_key(run: RunContext, index: int, name: str, parts: Mapping[str, Any]) -> str:
    content = {"step": index, "task": name, "config": run.config_digest, "code": run.code_version, **parts}
    return hashlib.sha256(canonical_json(content, "key")).hexdigest()


@cache
def module_digest(name: str) -> str:
    path = importlib.import_module(name).__file__
    assert path is not None, f"{name} has no source file"
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def carried(run: RunContext, index: int) -> dict[str, Ref]:
    if index == START + 1:
        tasks = run.directory.ledger.tasks(START)
        return {artifact: tasks[CARRIED_FROM[artifact]].outputs[artifact] for artifact in run.graph.carries}
    before = run.directory.ledger.effective_outputs(index - 1)
    return {artifact: before[source] for artifact, source in run.graph.carries.items()}


def commit_step(run: RunContext, index: int) -> None:
    began = time.perf_counter()
    manifest = _manifest(run, index)
    ref = run.directory.store.put_json("manifest", manifest.model_dump(mode="json"))
    durable.write_file(run.directory.path / manifest_place(index), f"{manifest.model_dump_json(indent=2)}\n".encode())
    now, before = time.time_ns() // 1_000_000, run.directory.ledger.step(index - 1)
    run.directory.ledger.append(
        StepEntry(
            step=index,
            manifest=ref,
            weights_digest=manifest.record.weights_digest,
            # Later than the step before even when the machine's clock was set back in between.
            committed_ms=now if before is None else max(now, before.committed_ms + 1),
            seconds=time.perf_counter() - began,
        )
    )
    shards_of(run, index).clear()


def step_metrics(run: RunContext, index: int) -> dict[str, float]:
    return stored_metrics(run.directory.ledger, run.directory.store, index)


def history(run: RunContext) -> list[dict[str, float]]:
    return [{**step_metrics(run, index), STEP: index} for index in sorted(run.directory.ledger.steps())]


def _manifest(run: RunContext, index: int) -> StepManifest:
    tasks = run.directory.ledger.tasks(index)
    outputs = run.directory.ledger.artifacts(index)
    available = outputs if index == START else {**carried(run, index), **outputs}
    policy = available["policy" if index == START else run.graph.carries["policy"]]
    scales = available["scales" if index == START else run.graph.carries["scales"]]
    steps = run.graph.steps if index > START else ()
    record = StepRecord(
        step=index,
        steps=run.config.steps,
        predecessor=record_digest(stored_manifest(run, index - 1)) if index > START else None,
        config_digest=run.config_digest,
        code_version=run.code_version,
        inputs={step.name: contents({port: available[name] for port, name in step.inputs.items()}) for step in steps},
        outputs={name: contents(entry.outputs) for name, entry in tasks.items()},
        model_revision=run.model_revision,
        seeds={"run": run.config.seed, "step": index},
        scales_digest=scales.digest,
        precision=run.config.precision.model_dump(mode="json"),
        executed={
            "rollout": run.ready_engine().describe(),
            "training": run.ready_trainer().describe(),
            "reward": run.verifier.describe(),
            **({"behaviour": "unverifiable"} if unverifiable(run.config) else {}),
            **({} if run.loss_source is None else {"loss": {"source": run.loss_source}}),
            **({"environment": dict(run.environment_description)} if run.environment_description else {}),
        },
        level=run.config.replay.level,
        weights_digest=run.directory.store.get_json(policy)["weights_digest"],
        versions=library_versions(),
    )
    observed = StepObservations(
        timings={name: entry.seconds for name, entry in tasks.items()},
        hardware=run.machine,
        git=run.git,
        paths={name: ref.uri for name, ref in outputs.items()},
        cluster={} if run.cluster is None else run.cluster.gang.places(),
        environment=_percentiles(run.environment_seconds.pop(index, [])),
    )
    return StepManifest(record=record, observed=observed)


def code_of(run: RunContext, index: int) -> str:
    """The code version that made a step, or makes it."""
    committed = run.directory.ledger.step(index) is not None
    return stored_manifest(run, index).record.code_version if committed else run.code_version


def stored_manifest(run: RunContext, index: int) -> StepManifest:
    return run.directory.store.get_manifest(committed_step(run, index).manifest)


def committed_step(run: RunContext, index: int) -> StepEntry:
    entry = run.directory.ledger.step(index)
    assert entry is not None, f"step {index} is not committed"
    return entry


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p95 = np.percentile(seconds, [50, 95], method="nearest").tolist()
    return {"answers": float(len(seconds)), "p50": p50, "p95": p95, "max": max(seconds)}
