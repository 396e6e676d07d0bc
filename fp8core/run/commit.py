"""Close an iteration: its manifest, and its line in the ledger."""

import time
from collections.abc import Sequence

import numpy as np

from fp8core import durable
from fp8core.alignment.bounds import unverifiable
from fp8core.run.context import RunContext
from fp8core.run.execute import carried
from fp8core.run.rollouts import shards_of
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.layout import manifest_place
from fp8core.store.ledger import START, LedgerView, StepEntry
from fp8core.store.manifest import (
    Content,
    StepManifest,
    StepObservations,
    StepRecord,
    library_versions,
    record_digest,
)
from fp8core.store.metrics import OF_START, start_metrics
from fp8core.store.step_manifests import read_manifest


def commit_step(run: RunContext, index: int) -> None:
    """Write the manifest of a finished iteration, and append it to the ledger; then its shards may go."""
    began = time.perf_counter()
    manifest = _manifest(run, index)
    ref = run.directory.store.put_json("manifest", manifest.model_dump(mode="json"))
    durable.write_file(run.directory.path / manifest_place(index), f"{manifest.model_dump_json(indent=2)}\n".encode())
    run.directory.ledger.append(
        StepEntry(
            step=index,
            manifest=ref,
            weights_digest=manifest.record.weights_digest,
            committed_ms=_commit_time(run, index),
            seconds=time.perf_counter() - began,
            compiled=run.new_kernels(),
        )
    )
    shards_of(run, index).clear()


def step_metrics(run: RunContext, index: int) -> dict[str, float]:
    """Metrics of a committed iteration: those of its record, or of what step 0 measured (`OF_START`)."""
    return stored_metrics(run.directory.ledger, run.directory.store, index)


def stored_metrics(ledger: LedgerView, store: ArtifactStore, index: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for ref in ledger.artifacts(index).values():
        if index == START and ref.kind in OF_START:
            metrics |= start_metrics(ref.kind, store.get_json(ref))
        if index > START and ref.kind == "metrics":
            metrics |= store.get_json(ref)
    return metrics


def _commit_time(run: RunContext, index: int) -> int:
    """Unix milliseconds, later than the step before even when the machine's clock was set back in between."""
    now, before = time.time_ns() // 1_000_000, run.directory.ledger.step(index - 1)
    return now if before is None else max(now, before.committed_ms + 1)


def _content(ref: Ref) -> Content:
    return Content(digest=ref.digest, size=ref.size)


def _manifest(run: RunContext, index: int) -> StepManifest:
    tasks = run.directory.ledger.tasks(index)
    outputs = run.directory.ledger.artifacts(index)
    available = outputs if index == START else {**carried(run, index), **outputs}
    policy = available["policy" if index == START else run.graph.carries["policy"]]
    scales = available["scales" if index == START else run.graph.carries["scales"]]
    reads = {planned.name: planned.inputs for planned in run.graph.steps} if index > START else {}
    record = StepRecord(
        step=index,
        steps=run.config.steps,
        predecessor=record_digest(stored_manifest(run, index - 1)) if index > START else None,
        config_digest=run.config_digest,
        code_version=run.code_version,
        inputs={
            task: {port: _content(available[artifact]) for port, artifact in ports.items()}
            for task, ports in reads.items()
        },
        outputs={
            name: {artifact: _content(ref) for artifact, ref in entry.outputs.items()} for name, entry in tasks.items()
        },
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
    answers = run.environment_seconds.pop(index, {})
    observed = StepObservations(
        timings={name: entry.seconds for name, entry in tasks.items()},
        hardware=run.machine,
        git=run.git,
        paths={name: ref.uri for name, ref in outputs.items()},
        cluster={} if run.cluster is None else run.cluster.places(),
        environment=_percentiles([seconds for each in answers.values() for seconds in each]),
        answers={episode: [round(seconds, 6) for seconds in each] for episode, each in sorted(answers.items())},
    )
    return StepManifest(record=record, observed=observed)


def code_of(run: RunContext, index: int) -> str:
    """The code version that made a step; of one that is not committed, this one."""
    committed = run.directory.ledger.step(index) is not None
    return stored_manifest(run, index).record.code_version if committed else run.code_version


def stored_manifest(run: RunContext, index: int) -> StepManifest:
    """The manifest of a committed step. Raises UserError: both copies are damaged."""
    return read_manifest(run.directory.store, run.directory.path, committed_step(run, index))


def committed_step(run: RunContext, index: int) -> StepEntry:
    entry = run.directory.ledger.step(index)
    assert entry is not None, f"step {index} is not committed"
    return entry


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p95 = np.percentile(seconds, [50, 95], method="nearest").tolist()
    return {"answers": float(len(seconds)), "p50": p50, "p95": p95, "max": max(seconds)}
