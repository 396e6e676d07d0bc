"""What one training of a parity run came to: the numbers that its verdict is made of, from the run's folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from fp8core.report.run_charts import ESS, K3
from fp8core.report.run_data import RunData
from fp8core.report.summary import GRAD_NORM, HELDOUT, TMPE, series
from fp8core.store.ledger import START

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

    steps: committed, and asked for. accuracy: held-out, mean of the last evaluations. errors, k3, ess, weights and
    ratios have a value for each step: token multiplicative probability error, k3 divergence (nats), effective sample
    size (share), mean raw importance weight of the mismatch and of the updates. idle: steps whose update had a
    gradient and left the weights as they were. speed: generated tokens per second. slope: MiB a step.
    """

    variant: str
    seed: int
    steps: tuple[int, int]
    accuracy: float | None
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
        """Whether every step that was asked for is committed."""
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
        errors=values(TMPE),
        k3=values(K3),
        ess=values(ESS),
        weights=values(WEIGHT),
        ratios=values(RATIO),
        idle=tuple(_idle(run)),
        speed=_speed(run),
        slope=slope(_memory_of_steps(run, memory)),
    )


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
