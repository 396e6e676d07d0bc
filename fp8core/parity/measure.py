"""The trainings that a parity run compares, and the numbers of each, from its run's folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from fp8core.config.run import CorrectionConfig, RunConfig
from fp8core.parity.learning import LearningCurve
from fp8core.report.charts import ESS, K3
from fp8core.report.run_data import RunData
from fp8core.report.summary import GRAD_NORM, HELDOUT, TMPE, series
from fp8core.store.artifacts import ArtifactError, read_checked
from fp8core.store.ledger import START

BASELINE = "bf16"
STRESS = "stress"
Side = Literal["bf16", "fp8", "fp8+kv"]

_FORMATS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8_block", "bf16"), "fp8+kv": ("fp8_block", "fp8")}
_UNCORRECTED = {"correction.method": "none", "correction.preset": None, "precision.accept_mismatch": True}


@dataclass(frozen=True)
class Variant:
    """Formats of both sides, and what else differs from the configuration."""

    name: str
    title: str
    rollout: Side
    training: Side
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def matched(self) -> bool:
        """True if both sides compute in the same formats."""
        return self.rollout == self.training


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(BASELINE, "BF16 on both sides: what the others are compared with", "bf16", "bf16"),
        Variant("fp8-rollout", "generation in FP8, training in BF16, no correction", "fp8", "bf16", _UNCORRECTED),
        Variant("fp8-rollout-corrected", "the same with the correction for the mismatch", "fp8", "bf16"),
        Variant("fp8-end-to-end", "linear layers in FP8 on both sides", "fp8", "fp8"),
        Variant("fp8-end-to-end-kv", "the KV cache and attention in FP8 as well", "fp8+kv", "fp8+kv"),
        Variant(
            STRESS,
            "FP8 everywhere, many large updates on each rollout: raw importance weights must average 1",
            "fp8+kv",
            "fp8+kv",
        ),
    )
}
"""By name, the baseline first."""


def variant_settings(variant: Variant, config: RunConfig, seed: int) -> dict[str, Any]:
    """Overrides of `config`, dotted keys, that make it the variant with a seed.

    The verdict judges alignment at the end: a bound of `alignment.stop` only warns, or a bad variant would not be seen
    to its end.
    """
    settings: dict[str, Any] = {"seed": seed, "alignment.stop.action": "warn"}
    for side, formats in (("rollout", variant.rollout), ("training", variant.training)):
        linear, kv_cache = _FORMATS[formats]
        settings |= {f"precision.{side}.linear": linear, f"precision.{side}.kv_cache": kv_cache}
    settings["precision.training.backward"] = None
    if variant.rollout != "fp8+kv":
        # The aligned model of vLLM is made for FP8 everywhere.
        settings["rollout.vllm.model"] = "stock"
    if corrected(config) != config.correction:
        settings |= {f"correction.{key}": value for key, value in corrected(config).model_dump(mode="json").items()}
    if variant.name == STRESS:
        settings |= stress_settings(config)
    return settings | dict(variant.settings)


def corrected(config: RunConfig) -> CorrectionConfig:
    """The correction of the corrected variants: the configured one, or truncated importance sampling for none."""
    return CorrectionConfig() if config.correction.method == "none" else config.correction


def stress_settings(config: RunConfig) -> dict[str, Any]:
    """Eight updates a rollout, or as many as it has prompts, at ten times the learning rate."""
    return {
        "training.minibatches": min(8, config.rollout.prompts_per_step),
        "training.learning_rate": min(1.0, 10 * config.training.learning_rate),
    }


WEIGHT, RATIO = "alignment/sampling_importance_ratio", "train/ratio_mean"
LEAST_STEPS_OF_A_SLOPE = 20


@dataclass(frozen=True)
class MemorySample:
    """Resident memory of the training process at a moment (Unix seconds)."""

    time: float
    process: int
    mebibytes: float


@dataclass(frozen=True)
class Measured:
    """One training. None, and an empty tuple: nothing was measured.

    steps: committed, and requested. accuracy: held-out, mean of the last evaluations. curve: scores of every held-out
    prompt at every evaluation. errors, k3, ess, weights and ratios have a value for each step. These are: token
    multiplicative probability error, k3 divergence (nats), effective sample size (share), mean raw importance weight of
    the mismatch and of the updates. idle: steps whose update had a gradient and left the weights as they were. speed:
    generated tokens per second. slope: MiB a step.
    """

    variant: str
    seed: int
    steps: tuple[int, int]
    accuracy: float | None
    curve: LearningCurve | None
    errors: tuple[float, ...]
    k3: tuple[float, ...]
    ess: tuple[float, ...]
    weights: tuple[float, ...]
    ratios: tuple[float, ...]
    idle: tuple[int, ...]
    speed: float | None
    slope: float | None

    @property
    def whole(self) -> bool:
        """True if every requested step is committed."""
        return self.steps[0] == self.steps[1]


def measure(run: RunData, variant: str, seed: int, last: int, memory: Sequence[MemorySample] = ()) -> Measured:
    """The numbers of a training.

    Args:
        run: its folder, as read.
        variant: name of the variant that it trained.
        seed: of the training.
        last: how many held-out accuracies at the end count.
        memory: samples of the process that trained.
    """

    def values(metric: str) -> tuple[float, ...]:
        return tuple(series(run.history, metric)[1])

    accuracies = values(HELDOUT)
    return Measured(
        variant=variant,
        seed=seed,
        steps=(max(run.evidence.steps, default=START), run.asked or -1),
        accuracy=fmean(accuracies[-last:]) if accuracies else None,
        curve=learning_curve(run),
        errors=values(TMPE),
        k3=values(K3),
        ess=values(ESS),
        weights=values(WEIGHT),
        ratios=values(RATIO),
        idle=tuple(_idle(run)),
        speed=_speed(run),
        slope=slope(_memory_of_steps(run, memory)),
    )


def learning_curve(run: RunData) -> LearningCurve | None:
    """Scores of all evaluations of a run; None when one of them is gone, or has no scores of the same prompts."""
    scores: dict[int, dict[str, float]] = {}
    for commit in run.evidence.steps.values():
        for ref in (ref for ref in commit.artifacts.values() if ref.kind == "evaluation"):
            try:
                content = json.loads(read_checked(run.evidence.folder / ref.uri, ref.digest, ref.size))
            except ArtifactError:
                return None
            if content:  # Steps between evaluations have an empty one.
                scores[commit.step] = content.get("scores", {})
    prompts = tuple(sorted(next(iter(scores.values()), {})))
    if not prompts or any(tuple(sorted(of)) != prompts for of in scores.values()):
        return None
    steps = tuple(sorted(scores))
    return LearningCurve(steps, prompts, np.array([[scores[step][prompt] for prompt in prompts] for step in steps]))


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Median slope of all pairs of (x, y) (Theil and Sen); None with fewer than LEAST_STEPS_OF_A_SLOPE points.

    Memory comes and goes in jumps, to which a least-squares line bends.
    """
    if len(points) < LEAST_STEPS_OF_A_SLOPE:
        return None
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))


def _idle(run: RunData) -> list[int]:
    gradients = dict(zip(*series(run.history, GRAD_NORM), strict=True))
    digests = {step: commit.entry.weights_digest for step, commit in run.evidence.steps.items()}
    return [
        step
        for step, digest in sorted(digests.items())
        if gradients.get(step, 0.0) > 0 and digests.get(step - 1) == digest
    ]


def _speed(run: RunData) -> float | None:
    """Over the steps of which both tokens and seconds are known, without the first, in which engines compile."""
    seconds = run.seconds.get("rollout", {})
    tokens = dict(zip(*series(run.history, "rollout/tokens"), strict=True))
    steps = [step for step in tokens if step in seconds and step > START + 1]
    spent = sum(seconds[step] for step in steps)
    return sum(tokens[step] for step in steps) / spent if spent > 0 else None


def _memory_of_steps(run: RunData, memory: Sequence[MemorySample]) -> list[tuple[float, float]]:
    """(step, MiB) at the commits of the second half, of the process that made the last of them."""
    points = []
    steps = sorted(step for step in run.evidence.steps if step > START)
    for step in steps[len(steps) // 2 :]:
        moment = run.evidence.steps[step].entry.committed_ms / 1000
        before = [sample for sample in memory if moment - 5 <= sample.time <= moment]
        if before:
            points.append((float(step), before[-1]))
    last = points[-1][1].process if points else None
    return [(step, sample.mebibytes) for step, sample in points if sample.process == last]
