"""Ship weights and scales to the rollout engine, read them back, and compare."""

from typing import Any

from fp8core.config.precision import PrecisionContract
from fp8core.config.steps import NoOptions
from fp8core.numerics.fingerprint import policy_digest
from fp8core.rollout.engine import PolicyScales, SyncReport
from fp8core.store.artifacts import Ref
from fp8core.workers.live import LiveRun
from tasks.calibrate import read_scales
from tasks.step import step


class SyncError(RuntimeError):
    """What the engine holds or runs is not what was sent or agreed."""


@step(
    inputs={"next_policy": "policy", "next_scales": "scales"},
    outputs={"sync_report": "sync_report"},
)
def sync(run: LiveRun, index: int, options: NoOptions, next_policy: Ref, next_scales: Ref) -> dict[str, Ref]:
    """Policy v_{i+1} and scales s_{i+1} reach the engine; the step fails when the read-back differs."""
    expected = run.directory.store.get_json(next_policy)
    trainer = run.ready_trainer()
    assert trainer.version == expected["version"], "the trainer does not hold the policy of this step"
    report = push(run, read_scales(run, next_scales))
    return {"sync_report": run.directory.store.put_json("sync_report", report)}


def push(run: LiveRun, scales: PolicyScales) -> dict[str, Any]:
    """Send the trainer's policy to the engine and prove that it arrived; returns the report as JSON types.

    Raises:
        SyncError: weights, scales, version or formats differ from what was sent or agreed.
    """
    trainer, engine = run.ready_trainer(), run.ready_engine()
    # Where the engine sleeps, the export has the memory of what it is about to replace.
    engine.rest()
    tensors = trainer.export()
    report = engine.update(tensors, scales, trainer.version)
    check_report(report, policy_digest(tensors), scales, trainer.version)
    described = engine.describe()
    check_formats(described, run.config.precision)
    return {
        "version": report.version,
        "digest": report.digest,
        "scales": [vars(layer) for layer in report.scales.layers],
        "engine": described,
    }


def check_report(report: SyncReport, digest: str, scales: PolicyScales, version: int) -> None:
    """Compare what was read back with what was sent."""
    if report.version != version or report.scales.version != version:
        raise SyncError(
            f"policy {version} was sent, the engine holds weights {report.version} with scales {report.scales.version}"
        )
    if report.digest != digest:
        raise SyncError(f"policy {version}: weights {digest[:16]} were sent, {report.digest[:16]} were read back")
    for layer, (sent, held) in enumerate(zip(scales.layers, report.scales.layers, strict=True)):
        if sent != held:
            raise SyncError(f"policy {version}, layer {layer}: scales {sent} were sent, {held} were read back")


def check_formats(described: dict[str, object], contract: PrecisionContract) -> None:
    """Compare what the engine says it runs with the contract."""
    linears = described["linear"]
    assert isinstance(linears, list)
    last = len(linears) - contract.bf16_last_layers
    outer = "fp32" if contract.rollout.linear == "fp32" else "bf16"
    for layer, name in enumerate(linears):
        agreed = contract.rollout.linear if contract.bf16_first_layers <= layer < last else outer
        if name != agreed:
            raise SyncError(f"layer {layer} runs its linears in {name}, the contract says {agreed}")
    pairs = {"attention": contract.rollout.kv_cache, "head": contract.rollout.head, "scale_rule": contract.scale_rule}
    if contract.rounding_points != "stepwise":
        pairs["rounding_points"] = contract.rounding_points
    for key, agreed_value in pairs.items():
        if described[key] != agreed_value:
            raise SyncError(f"the engine runs {key}={described[key]}, the contract says {agreed_value}")
