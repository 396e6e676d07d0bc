"""Run one step of one iteration, or take its stored result, whose key is a digest of all that it is a function of."""

import hashlib
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8core import durable
from fp8core.alignment.bounds import unverifiable
from fp8core.config.step_graph import PlannedStep
from fp8core.config.steps import import_step
from fp8core.errors import NotRecordedError, UserError, described_error, printable
from fp8core.run.context import RunContext, StepContext
from fp8core.run.policy import SyncError
from fp8core.run.rollouts import stored_judgements
from fp8core.store.artifacts import Ref, contents
from fp8core.store.json_text import canonical_json
from fp8core.store.layout import manifest_place
from fp8core.store.ledger import CARRIED_FROM, START, StepEntry, TaskEntry, stored_metrics
from fp8core.store.manifest import StepManifest, StepObservations, StepRecord, library_versions, record_digest
from fp8core.store.metrics import STEP, Interval
from fp8core.training.trainer import UpdateError


class StepError(RuntimeError):
    """A task failed without saying why in words for people; `__cause__` is what it raised."""


@dataclass(frozen=True)
class TaskResult:
    """`interval`: when its body ran, perf_counter seconds."""

    entry: TaskEntry
    is_reused: bool
    interval: Interval


def run_step(run: RunContext, index: int, planned: PlannedStep, inputs: Mapping[str, Ref]) -> TaskResult:
    """Call a step and commit its outputs, or take what is stored under the same key; errors name the task."""
    torch.set_num_threads(run.config.threads)  # It belongs to a thread.
    key = step_key(run, index, planned, inputs)
    if (result := stored_result(run, index, planned, key)) is not None:
        return result
    step = import_step(planned.uses)
    began = time.perf_counter()
    start_time = time.time()
    with run.console.part(f"step {index}, {planned.name}"), task_errors(index, planned.name):
        step_outputs = step(run, index, planned.options, **inputs)
        kinds = {port: ref.kind for port, ref in step_outputs.items()}
        if kinds != dict(planned.spec.outputs):
            raise UserError(f"{planned.uses} returned {kinds}, but declares {dict(planned.spec.outputs)}")
    outputs = {planned.outputs[port]: ref for port, ref in step_outputs.items()}
    return _commit(run, index, planned.name, key, outputs, began, start_time)


def stored_result(run: RunContext, index: int, planned: PlannedStep, key: str) -> TaskResult | None:
    """The ledger's result of a step that needs no call, else None; `key`: its `step_key`."""
    if planned.spec.redo and run.trainer.version < index:
        # The trainer does not hold it, whatever is stored. Its inputs were made anew (edited code), and came out equal.
        return None
    return _ledger_result(run, index, planned.name, key)


def run_start_task(
    run: RunContext, name: str, parts: Mapping[str, Any], body: Callable[[], dict[str, Ref]]
) -> TaskResult:
    """As `run_step`, for work before the first step. `parts`: what its outputs are a function of, beside the run."""
    key = _task_key(run, START, name, parts)
    if (result := _ledger_result(run, START, name, key)) is not None:
        return result
    began = time.perf_counter()
    start_time = time.time()
    with run.console.part(f"step {START}, {name}"), task_errors(START, name):
        outputs = body()
    return _commit(run, START, name, key, outputs, began, start_time)


def finished_steps(run: RunContext, index: int, start: Mapping[str, Ref]) -> list[PlannedStep]:
    entries = run.directory.ledger.tasks(index)
    artifacts = dict(start)
    steps = list[PlannedStep]()
    for planned in run.graph.steps:
        if planned.name in entries and artifacts.keys() >= set(planned.inputs.values()):
            inputs = {port: artifacts[artifact] for port, artifact in planned.inputs.items()}
            entry = entries[planned.name]
            key = step_key(run, index, planned, inputs)
            if entry.key == key and intact(run, entry.outputs):
                artifacts |= entry.outputs
                steps.append(planned)
    return steps


def intact(run: RunContext, refs: Mapping[str, Ref]) -> bool:
    return all(run.store.is_intact(ref) for ref in refs.values())


def step_key(run: RunContext, index: int, planned: PlannedStep, inputs: Mapping[str, Ref]) -> str:
    """SHA-256 of all that the outputs are a function of."""
    parts = {
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
    return _task_key(run, index, planned.name, parts)


def _task_key(run: RunContext, index: int, name: str, parts: Mapping[str, Any]) -> str:
    content = {"step": index, "task": name, "config": run.config_digest, "code": run.code_version, **parts}
    return hashlib.sha256(canonical_json(content, "key")).hexdigest()


def _ledger_result(run: RunContext, index: int, name: str, key: str) -> TaskResult | None:
    began = time.perf_counter()
    entry = run.directory.ledger.tasks(index).get(name)
    if entry is None:
        return None
    is_committed = run.directory.ledger.step(index) is not None
    if is_committed or (entry.key == key and intact(run, entry.outputs)):
        return TaskResult(entry, is_reused=True, interval=(began, time.perf_counter()))
    return None


def _commit(
    run: RunContext, index: int, name: str, key: str, outputs: dict[str, Ref], began: float, start_time: float
) -> TaskResult:
    seconds = time.perf_counter() - began
    entry = TaskEntry(step=index, task=name, key=key, outputs=outputs, started=start_time, seconds=seconds)
    run.directory.ledger.append(entry)
    return TaskResult(entry, is_reused=False, interval=(began, time.perf_counter()))


@contextmanager
def task_errors(index: int, name: str) -> Iterator[None]:
    """Let the errors of a task's body name it. Raises StepError: what the body raised has no words for people."""
    place = f"step {index}, task {name}"
    try:
        yield
    except (UserError, UpdateError, SyncError, NotRecordedError) as error:
        raise type(error)(printable(f"{place}: {error}")) from error
    except Exception as error:
        raise StepError(printable(f"{place}: {described_error(error)}")) from error


@cache
def module_digest(name: str) -> str:
    path = importlib.import_module(name).__file__
    assert path is not None, f"{name} has no source file"
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def carried_artifacts(run: RunContext, index: int) -> dict[str, Ref]:
    if index == START + 1:
        tasks = run.directory.ledger.tasks(START)
        return {artifact: tasks[CARRIED_FROM[artifact]].outputs[artifact] for artifact in run.graph.carries}
    before = run.directory.ledger.effective_outputs(index - 1)
    return {artifact: before[source] for artifact, source in run.graph.carries.items()}


def commit_step(run: RunContext, index: int) -> None:
    began = time.perf_counter()
    manifest = _manifest(run, index)
    ref = run.store.put_json("manifest", manifest.model_dump(mode="json"))
    durable.write_file(run.directory.path / manifest_place(index), f"{manifest.model_dump_json(indent=2)}\n".encode())
    now = time.time_ns() // 1_000_000
    before = run.directory.ledger.step(index - 1)
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
    run.store.shards(index).clear()
    run.answers.forget([judgement.request for judgement in stored_judgements(run, index)])
    run.store.forget_tables()


def step_metrics(run: RunContext, index: int) -> dict[str, float]:
    return stored_metrics(run.directory.ledger, run.store, index)


def history(run: RunContext) -> list[dict[str, float]]:
    return [{**step_metrics(run, index), STEP: index} for index in sorted(run.directory.ledger.steps())]


def _manifest(run: RunContext, index: int) -> StepManifest:
    tasks = run.directory.ledger.tasks(index)
    outputs = run.directory.ledger.artifacts(index)
    available = outputs if index == START else {**carried_artifacts(run, index), **outputs}
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
            "rollout": run.engine.describe(),
            "training": run.trainer.describe(),
            "reward": run.verifier.describe(),
            **({"behaviour": "unverifiable"} if unverifiable(run.config) else {}),
            **({} if run.loss_source is None else {"loss": {"source": run.loss_source}}),
            **({"environment": dict(run.environment_description)} if run.environment_description else {}),
        },
        level=run.config.replay.level,
        weights_digest=run.store.get_json(policy)["weights_digest"],
        versions=library_versions(),
    )
    observations = StepObservations(
        timings={name: entry.seconds for name, entry in tasks.items()},
        hardware=run.machine,
        git=run.git,
        paths={name: ref.uri for name, ref in outputs.items()},
        cluster={} if run.cluster is None else run.cluster.workers.places(),
        environment=_percentiles(run.reply_seconds.pop(index, [])),
        drafts=run.draft_counts.pop(index, {}),
    )
    return StepManifest(record=record, observed=observations)


def code_of(run: RunContext, index: int) -> str:
    """The code version that made a step, or makes it."""
    is_committed = run.directory.ledger.step(index) is not None
    return stored_manifest(run, index).record.code_version if is_committed else run.code_version


def stored_manifest(run: StepContext, index: int) -> StepManifest:
    return run.store.get_manifest(committed_step(run, index).manifest)


def committed_step(run: StepContext, index: int) -> StepEntry:
    entry = run.ledger.step(index)
    assert entry is not None, f"step {index} is not committed"
    return entry


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p95 = np.percentile(seconds, [50, 95], method="nearest").tolist()
    return {"answers": float(len(seconds)), "p50": p50, "p95": p95, "max": max(seconds)}
