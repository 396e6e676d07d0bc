"""Close an iteration: its manifest, and its line in the ledger."""

import time

from fp8core.report.summary import STEP
from fp8core.store import durable
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.ledger import START, LedgerView, StepEntry
from fp8core.store.manifest import Content, StepManifest, StepObservations, StepRecord, record_digest
from fp8core.store.shards import RolloutShards
from fp8core.store.versions import library_versions
from fp8core.workers.live import LiveRun
from tasks.repair import manifest_file, stored_manifest
from tasks.restore import carried, ensure
from tasks.rollout import shard_folder


def commit_step(run: LiveRun, index: int) -> None:
    """Write the manifest of a finished iteration and append it to the ledger; then its shards may go."""
    began = time.perf_counter()
    manifest = _manifest(run, index)
    ref = run.directory.store.put_json("manifest", manifest.model_dump(mode="json"))
    durable.write_file(manifest_file(run.directory.path, index), f"{manifest.model_dump_json(indent=2)}\n".encode())
    run.directory.ledger.append(
        StepEntry(
            step=index,
            manifest=ref,
            weights_digest=manifest.record.weights_digest,
            committed_ms=_commit_time(run, index),
            seconds=time.perf_counter() - began,
        )
    )
    RolloutShards(shard_folder(run, index)).clear()


def step_metrics(run: LiveRun, index: int) -> dict[str, float]:
    """Metrics of a committed iteration: those of its record, or of the first evaluation for step 0."""
    return stored_metrics(run.directory.ledger, run.directory.store, index)


def stored_metrics(ledger: LedgerView, store: ArtifactStore, index: int) -> dict[str, float]:
    """`step_metrics` of a run that is not live."""
    if index == START:
        measured = store.get_json(ledger.tasks(index)["evaluate"].outputs["evaluation"])
        return {"reward/heldout_accuracy": measured["accuracy"], "reward/heldout_length_mean": measured["length_mean"]}
    metrics: dict[str, float] = {}
    for ref in ledger.artifacts(index).values():
        if ref.kind == "metrics":
            metrics |= store.get_json(ref)
    return metrics


def history(run: LiveRun) -> list[dict[str, float]]:
    """Metrics of every committed iteration in order; step 0 is the state before the first update."""
    for index in run.directory.ledger.steps():
        ensure(run, index, {"metrics"})
    return [{**step_metrics(run, index), STEP: index} for index in sorted(run.directory.ledger.steps())]


def _commit_time(run: LiveRun, index: int) -> int:
    """Unix milliseconds, later than the step before even when the machine's clock was set back in between."""
    now, before = time.time_ns() // 1_000_000, run.directory.ledger.step(index - 1)
    return now if before is None else max(now, before.committed_ms + 1)


def _content(ref: Ref) -> Content:
    return Content(digest=ref.digest, size=ref.size)


def _manifest(run: LiveRun, index: int) -> StepManifest:
    tasks = run.directory.ledger.tasks(index)
    outputs = run.directory.ledger.artifacts(index)
    available = outputs if index == START else {**carried(run, index), **outputs}
    policy = available["policy" if index == START else run.plan.carries["policy"]]
    scales = available["scales" if index == START else run.plan.carries["scales"]]
    reads = {planned.name: planned.inputs for planned in run.plan.steps} if index > START else {}
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
    )
    return StepManifest(record=record, observed=observed)
