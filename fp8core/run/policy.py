"""Hand the trainer's policy and its scales to the engine, and prove that both arrived."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fp8core.alignment.bounds import beyond, stop_bounds
from fp8core.config.precision import PrecisionContract
from fp8core.errors import StoredFileError
from fp8core.models.safetensors_files import TensorSource
from fp8core.models.weights import EngineWeights
from fp8core.rl.alignment_metrics import EXPONENT_BOUND
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import PolicyScales, Probe, SyncReport
from fp8core.run.build import build_trainer
from fp8core.run.context import RunContext, StepContext
from fp8core.run.rollouts import prompt_table
from fp8core.store.ledger import START
from fp8core.training.trainer import ScoringTrainer, Trainer

_PROBES = 8
_LONGEST = 128


class SyncError(RuntimeError):
    """The engine holds or runs something other than what was sent or agreed."""


def initial_trainer(run: RunContext) -> Trainer:
    weights = run.initial_policy()
    if run.cluster is None:
        return build_trainer(run.config, run.arch, weights)
    assert isinstance(weights, TensorSource), "nothing hands weights to ranks"
    trainer = run.cluster.build_trainer(run.config, run.arch, weights)
    policy = run.store.get_json(run.directory.ledger.tasks(START)["warm_start"].outputs["policy"])
    if trainer.start_digest != policy["weights_digest"]:
        trainer.close()
        raise StoredFileError(
            f"policy 0 has weights {policy['weights_digest']}, but the ranks start from {trainer.start_digest}: "
            "a node sees other files, or its processor draws other values than the one that the run began on "
            "(ATEN_CPU_CAPABILITY=default in the environment of all processes makes those of a new run equal)"
        )
    return trainer


def push(run: StepContext, scales: PolicyScales) -> dict[str, Any]:
    """Send the trainer's policy to the engine; the report as JSON types. Raises SyncError: what arrived differs."""
    trainer = run.trainer
    engine = run.engine
    # Before the engine wakes: where both share a device, the trainer's pass has its memory.
    probes, expected = trainer_probe(run, scales)
    # Where the engine sleeps, the export has the memory of what it is about to replace.
    engine.sleep()
    weights = trainer.export()
    if run.config.pipeline.mode != "synchronous":
        keep_policy(run, weights, scales)
    report = engine.update(weights, scales, trainer.version)
    check_report(report, weights.digest(), scales, trainer.version)
    description = engine.describe()
    check_formats(description, run.config.precision)
    probe = compare_probe(expected, engine.score(probes, run.config.rollout.temperature))
    check_probe(run, probe, trainer.version)
    return {
        "version": report.version,
        "digest": report.digest,
        "scales": [vars(layer) for layer in report.scales.layers],
        "engine": description,
        "probe": probe,
    }


@dataclass(frozen=True)
class PolicyVersion:
    tensors: Any
    scales: PolicyScales


def keep_policy(run: StepContext, weights: EngineWeights, scales: PolicyScales) -> None:
    trainer = run.trainer
    assert isinstance(trainer, ScoringTrainer), "the configuration was checked"
    oldest = trainer.version + 1 - run.config.pipeline.kept_policies
    versions = run.workers.policy_versions
    for version in [version for version in versions if version < oldest or version == scales.version]:
        trainer.forget(versions.pop(version).tensors)
    versions[scales.version] = PolicyVersion(trainer.keep(weights), scales)


def trainer_probe(run: StepContext, scales: PolicyScales) -> tuple[list[Probe], list[float]]:
    if (probes := run.workers.probes) is None:
        problems = run.source.training(1, min(_PROBES, run.config.rollout.prompts_per_step), run.config.seed)
        rows = [tokens[:_LONGEST] for tokens in prompt_table(run, problems)["tokens"].to_pylist()]
        probes = run.workers.probes = [probe_of(tokens, i, len(rows)) for i, tokens in enumerate(rows)]
    batch = TokenBatch.of([probe.context for probe in probes], [[probe.target] for probe in probes])
    score = run.trainer.logprobs(batch, run.config.rollout.temperature, scales.layers)
    return probes, score.logprobs[:, 0].tolist()


def probe_of(prompt: Sequence[int], index: int, count: int) -> Probe:
    """The end of a prompt is avoided: the tokens of a chat template are certain whatever the policy."""
    if len(prompt) == 1:
        return Probe((prompt[0],), prompt[0])
    cut = 1 + (len(prompt) - 2) * (index + 1) // (count + 1)
    return Probe(tuple(prompt[:cut]), prompt[cut])


def compare_probe(expected: Sequence[float], engines: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of the engine that is farthest off: the tokens, how many differ, and the mean of exp |difference|."""

    def probe_gap(row: Sequence[float]) -> dict[str, float]:
        differences = [abs(ours - theirs) for ours, theirs in zip(row, expected, strict=True)]
        # A value that is not a number is as far off as can be.
        errors = [math.exp(d if d < EXPONENT_BOUND else EXPONENT_BOUND) for d in differences]
        differing = sum(d != 0 for d in differences)
        return {"tokens": len(differences), "differing": differing, "error": sum(errors) / len(errors)}

    return max(map(probe_gap, engines), key=lambda gap: (gap["error"], gap["differing"]))


def check_probe(run: StepContext, gap: dict[str, float], version: int) -> None:
    bounds = stop_bounds(run.config)
    if (bounds.action, bounds.patience) != ("fail", 1):
        return
    for name, value in (("probe_differing", gap["differing"]), ("probe_error", gap["error"])):
        if name in bounds.limits and beyond(bounds, name, value):
            raise SyncError(
                f"alignment.stop.{name}={bounds.limits[name]:g}: after the sync of policy {version}, "
                f"{gap['differing']} of {gap['tokens']} known tokens are scored differently by engine and trainer "
                f"(error {gap['error']:.6g}), though all that was read back is as it was sent"
            )


def check_report(report: SyncReport, digest: str, scales: PolicyScales, version: int) -> None:
    if report.version != version or report.scales.version != version:
        raise SyncError(
            f"policy {version} was sent, the engine holds weights {report.version} with scales {report.scales.version}"
        )
    if report.digest != digest:
        raise SyncError(f"policy {version}: weights {digest[:16]} were sent, {report.digest[:16]} were read back")
    for layer, (ours, theirs) in enumerate(zip(scales.layers, report.scales.layers, strict=True)):
        if ours != theirs:
            raise SyncError(f"policy {version}, layer {layer}: scales {ours} were sent, {theirs} were read back")


def check_formats(description: dict[str, object], contract: PrecisionContract) -> None:
    linears = description["linear"]
    assert isinstance(linears, list)
    outer = "fp32" if contract.rollout.linear == "fp32" else "bf16"
    for layer, name in enumerate(linears):
        expected = contract.rollout.linear if contract.recipe.in_fp8(layer, len(linears)) else outer
        if name != expected:
            raise SyncError(f"layer {layer} runs its linears in {name}, the contract says {expected}")
    pairs: dict[str, object] = {
        "attention": contract.attention_of(contract.rollout),
        "head": contract.rollout.head,
        "scale_rule": contract.scale_rule,
    }
    if contract.rounding_points != "stepwise":
        pairs["rounding_points"] = contract.rounding_points
    for key, agreed_value in pairs.items():
        if description[key] != agreed_value:
            raise SyncError(f"the engine runs {key}={description[key]}, the contract says {agreed_value}")
