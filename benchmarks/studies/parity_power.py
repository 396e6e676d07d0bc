"""How often the verdict of a parity run is right: nights that are drawn from a model of real learning curves.

    python -m benchmarks.studies.parity_power --fit runs runs/parity-NAME-*    the model, from trainings of a parity run
    python -m benchmarks.studies.parity_power [--nights 500] [--seeds 10]         nights of that model, their table

A night has BF16 and four variants, of which one may be worse. `judge`, the function of the real night, gives its
verdict; everything but the curves is without fault. A prompt is answered right where this is positive:

    mean(step) + seed(step) + training(step) + prompt + prompt of the seed + answer(step)

seed, training and answer are first-order autoregressions: a curve that is high stays high, an answer that is right
stays right. All parameters are moments of real curves. The spread of trainings includes that of their prompts, which
the model draws once more: it is too wide rather than too narrow.

Predicted before any curve was drawn: between trainings of a seed an accuracy spreads by 0.02, three seeds pass 15 % of
equal nights by the rule before, and eight seeds are enough for the new one.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import RESULTS, Row, provenance, table, write_rows
from fp8core.config.load import load_config
from fp8core.config.parity import ParityConfig
from fp8core.evaluation.measure import wilson_interval
from fp8core.parity.golden import Golden
from fp8core.parity.measure import (
    BASELINE,
    STRESS,
    VARIANTS,
    LearningCurve,
    Measured,
    Pair,
    learning_curve,
    mean_interval,
    steps_to_reach,
)
from fp8core.parity.verdict import FAIL, NOT_ENOUGH, PASS, judge
from fp8core.report.run_data import read_run

STORED = RESULTS / "parity_power.json"
COMPARED = tuple(name for name in VARIANTS if name not in (BASELINE, STRESS))
HIGHEST = 0.998  # The model's accuracy of a training that answers everything right.
OLD_SEEDS, OLD_EVERY, OLD_LAST, OLD_GAP = 3, 5, 3, 0.05
_NORMAL = NormalDist()
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Model:
    """Accuracy of BF16 at each step from 0, and the spreads of the threshold's parts, in which `answer` has 1.

    seed, training: (standard deviation, correlation of one step with the next). answer: that correlation.
    """

    accuracy: tuple[float, ...]
    seed: tuple[float, float]
    training: tuple[float, float]
    prompt: float
    prompt_of_seed: float
    answer: float


@dataclass(frozen=True)
class Scenario:
    """The learning curve of BF16, and from it that of the worse variant: both from the accuracies of the model.

    noisy: trainings of a seed spread by NOISE, in units of accuracy's probit, not as in the model.
    """

    task: str
    loss: str
    baseline: Callable[[Floats], Floats]
    variant: Callable[[Floats], Floats]
    noisy: bool = False


def at_ceiling(accuracy: Floats) -> Floats:
    """Tiny as it is: all is learned."""
    return accuracy


def below_ceiling(accuracy: Floats) -> Floats:
    """A task of which a quarter is never learned."""
    return accuracy[0] + (accuracy - accuracy[0]) * (0.75 - accuracy[0]) / (accuracy[-1] - accuracy[0])


def worse(points: float) -> Callable[[Floats], Floats]:
    """A variant that learns less, by `points` at the end."""

    def of(accuracy: Floats) -> Floats:
        return accuracy - points / 100 * (accuracy - accuracy[0]) / (accuracy[-1] - accuracy[0])

    return of


def behind(points: float) -> Callable[[Floats], Floats]:
    """A variant that is `points` behind until its last ten points, and ends the same."""

    def of(accuracy: Floats) -> Floats:
        return accuracy - points / 100 * np.clip((accuracy[-1] - accuracy) / 0.1, 0, 1)

    return of


def slower(share: float) -> Callable[[Floats], Floats]:
    """A variant that needs more steps, by `share` of them."""

    def of(accuracy: Floats) -> Floats:
        steps = np.arange(len(accuracy))
        return np.interp(steps / (1 + share), steps, accuracy)

    return of


def collapsing(points: float) -> Callable[[Floats], Floats]:
    """A variant that loses `points` in the last quarter of the steps."""

    def of(accuracy: Floats) -> Floats:
        steps = np.linspace(0, 1, len(accuracy))
        return accuracy - points / 100 * np.clip(20 * (steps - 0.7), 0, 1)

    return of


NONE, FIVE, EIGHT, LATE = "none", "5 points", "8 points", "8 points in the last quarter"
SLOWER = "25 % more steps"
LOSSES = {
    NONE: worse(0),
    FIVE: worse(5),
    EIGHT: worse(8),
    LATE: collapsing(8),
    "5 points while it learns": behind(5),
    SLOWER: slower(0.25),
    "50 % more steps": slower(0.5),
}
NOISE = (0.05, 0.9)
"""Trainings whose ends differ by 0.025 and whose curves stay apart: with these the rule before is weak."""
CEILING, BELOW = "tiny, at its ceiling", "a quarter is never learned"
SCENARIOS = [
    *(Scenario(CEILING, loss, at_ceiling, of) for loss, of in LOSSES.items()),
    *(Scenario(f"{CEILING}, noisy", loss, at_ceiling, LOSSES[loss], noisy=True) for loss in (NONE, FIVE, SLOWER)),
    *(Scenario(BELOW, loss, below_ceiling, LOSSES[loss]) for loss in (NONE, FIVE, EIGHT, LATE)),
    *(Scenario(f"{BELOW}, noisy", loss, below_ceiling, LOSSES[loss], True) for loss in (NONE, FIVE, EIGHT, LATE)),
]


def fit(curves: dict[tuple[str, int], LearningCurve]) -> Model:
    """The model of trainings of BF16 and one variant with the same seeds."""
    (variant,) = {name for name, _ in curves} - {BASELINE}
    seeds = sorted(seed for name, seed in curves if name == BASELINE)
    scores = np.array([[curves[name, seed].scores for seed in seeds] for name in (BASELINE, variant)])
    accuracy = scores.mean(axis=3)
    mean = np.minimum(accuracy[0].mean(axis=0), HIGHEST)
    learning = slice(0, int(np.argmax(mean >= 0.95)))
    right = scores[:, :, learning]
    same, other, next_step = (
        np.mean([_association(*two) for two in pairs])
        for pairs in (
            [(right[0, i], right[1, i]) for i in range(len(seeds))],
            [(right[0, i], right[0, j]) for i in range(len(seeds)) for j in range(i)],
            [(one[:-1], one[1:]) for side in right for one in side],
        )
    )
    total = 1 / (1 - same)
    z = _probit(accuracy[:, :, learning]) * math.sqrt(total)
    z = z - z.mean(axis=1, keepdims=True)
    between, shared = (z[1] - z[0]) / math.sqrt(2), z[0] * z[1]
    freedom = len(seeds) / (len(seeds) - 1)
    return Model(
        accuracy=tuple(float(value) for value in mean),
        seed=(math.sqrt(max(0.0, float(shared.mean()) * freedom)), _following((z[0] + z[1]) / 2)),
        training=(math.sqrt(float((between**2).mean()) * freedom), _following(between)),
        prompt=math.sqrt(max(0.0, float(other) * total)),
        prompt_of_seed=math.sqrt(max(0.0, float(same - other) * total)),
        answer=float(np.clip(next_step * total - same * total, 0, 0.999)),
    )


def pair_spreads(pairs: Sequence[Pair]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation, over pairs, of the values that the verdict compares."""
    curve = [float(pair.variant.scores[1:].mean() - pair.baseline.scores[1:].mean()) for pair in pairs]
    steps = [[steps_to_reach(one, ParityConfig().reach) for one in (pair.variant, pair.baseline)] for pair in pairs]
    delays = [ours - theirs for ours, theirs in steps if ours is not None and theirs is not None]
    return {
        "accuracy, mean of the curve": (fmean(curve), stdev(curve)),
        "steps to reach 0.9": (fmean(delays), stdev(delays)),
    }


def drawn_pairs(model: Model, prompts: int, seeds: int) -> list[Pair]:
    """Equal trainings of the model at its ceiling."""
    night = draw_night(model, SCENARIOS[0], seeds, prompts, np.random.default_rng(0))
    curves = {(one.variant, one.seed): one.curve for one in night if one.curve is not None}
    return [Pair(curves[COMPARED[0], seed], curves[BASELINE, seed]) for seed in range(seeds)]


def _association(ours: Floats, theirs: Floats) -> float:
    """Correlation of the thresholds behind answers [step, prompt] (tetrachoric, by Pearson's approximation)."""
    found = []
    for a, b in zip(ours > 0, theirs > 0, strict=True):
        both, neither, first, second = ((p & q).sum() + 0.5 for p, q in ((a, b), (~a, ~b), (a, ~b), (~a, b)))
        found.append(math.cos(math.pi / (1 + math.sqrt(both * neither / (first * second)))))
    return fmean(found)


def _following(series: Floats) -> float:
    """Correlation of one step with the next of [training, step]."""
    return float(np.clip((series[:, :-1] * series[:, 1:]).mean() / (series**2).mean(), 0, 0.999))


def _probit(share: Floats) -> Floats:
    return np.vectorize(_NORMAL.inv_cdf)(np.clip(share, 1 - HIGHEST, HIGHEST))


def draw_night(
    model: Model, scenario: Scenario, seeds: int, prompts: int, random: np.random.Generator
) -> list[Measured]:
    """The trainings of a night; the first variant is the worse one."""
    base = scenario.baseline(np.array(model.accuracy))
    steps = tuple(range(len(base)))
    names = tuple(f"{number:04d}" for number in range(prompts))
    scale = math.sqrt(1 + model.prompt**2 + model.prompt_of_seed**2)
    means = {BASELINE: base, COMPARED[0]: scenario.variant(base)}
    means |= dict.fromkeys(COMPARED[1:], base)
    spread = (NOISE[0] * scale, NOISE[1]) if scenario.noisy else model.training
    # [step, seed, variant, prompt]; an autoregression of all of them at once.
    shape = (len(base), seeds, len(means), prompts)
    threshold = np.stack([_probit(mean) * scale for mean in means.values()], axis=1)[:, None, :, None]
    threshold = threshold + model.seed[0] * _regressed(model.seed[1], (len(base), seeds, 1, 1), random)
    threshold = threshold + spread[0] * _regressed(spread[1], (len(base), seeds, len(means), 1), random)
    own = model.prompt * random.standard_normal(prompts, np.float32)
    own = own + model.prompt_of_seed * random.standard_normal((seeds, 1, prompts), np.float32)
    scores = _regressed(model.answer, shape, random) + threshold.astype(np.float32) + own.astype(np.float32) > 0
    return [
        faultless(name, seed, LearningCurve(steps, names, scores[:, seed, number].astype(np.float64)))
        for seed in range(seeds)
        for number, name in enumerate(means)
    ]


def _regressed(correlation: float, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    """A first-order autoregression along the first axis, of variance 1 throughout."""
    values = random.standard_normal(shape, np.float32)
    values[1:] *= math.sqrt(1 - correlation**2)
    for step in range(1, shape[0]):
        values[step] += correlation * values[step - 1]
    return values


def faultless(variant: str, seed: int, curve: LearningCurve) -> Measured:
    """A training of which nothing but its curve can fail the verdict."""
    ones = (1.0,) * 4
    last = curve.steps[-1]
    accuracy = curve.mean_of_last(1)
    return Measured(variant, seed, (last, last), accuracy, curve, ones, (0.0,) * 4, ones, ones, ones, (), None, 0.0)


def verdict(night: Sequence[Measured], config: ParityConfig) -> str:
    """Of the night, by the function that judges real ones."""
    seeds = sorted({one.seed for one in night})
    variants = (BASELINE, *COMPARED)
    found = judge(night, Golden(1, ()), config, variants=variants, seeds=seeds, platform="cpu", failures={})
    return found.outcome


def old_verdict(night: Sequence[Measured], config: ParityConfig) -> str:
    """As it was judged before: the end alone, of three seeds, evaluated every fifth step."""
    ends = {
        (one.variant, one.seed): float(one.curve.scores[::OLD_EVERY][-OLD_LAST:].mean()) for one in night if one.curve
    }
    outcomes = set()
    for variant in COMPARED:
        gaps = [ends[variant, seed] - ends[BASELINE, seed] for seed in range(OLD_SEEDS)]
        low, high = mean_interval(gaps, config.confidence)
        outcomes.add(PASS if low >= -OLD_GAP else FAIL if high < -OLD_GAP else NOT_ENOUGH)
    return next(outcome for outcome in (FAIL, NOT_ENOUGH, PASS) if outcome in outcomes)


def simulate(model: Model, config: ParityConfig, prompts: int, nights: int, seed: int = 0) -> list[Row]:
    """Verdicts on the nights of every scenario."""
    rows = []
    for number, scenario in enumerate(SCENARIOS):
        random = np.random.default_rng((seed, number))
        outcomes, old = [], []
        for _ in range(nights):
            night = draw_night(model, scenario, config.seeds, prompts, random)
            outcomes.append(verdict(night, config))
            old.append(old_verdict(night, config))
        counts = {
            rule: {o: of.count(o) for o in (PASS, FAIL, NOT_ENOUGH)} for rule, of in (("new", outcomes), ("old", old))
        }
        about = {"seeds": config.seeds, "task": scenario.task, "loss": scenario.loss, "nights": nights}
        rows.append({"kind": "simulation", **about, **counts, **provenance()})
        print(*_cells(rows[-1]), sep=" | ", flush=True)
    return rows


def power_table(rows: Sequence[Row]) -> str:
    """The share of nights of each outcome with its 95 % interval."""
    head = ["task", "loss of one variant", "PASS", "FAIL", "NOT ENOUGH DATA", "rule before: PASS", "FAIL"]
    return table(head, map(_cells, rows))


def _cells(row: Row) -> list[str]:
    new, old, nights = row["new"], row["old"], row["nights"]
    rates = [_rate(new[outcome], nights) for outcome in (PASS, FAIL, NOT_ENOUGH)]
    return [row["task"], row["loss"], *rates, *(_rate(old[outcome], nights) for outcome in (PASS, FAIL))]


def _rate(count: int, nights: int) -> str:
    low, high = wilson_interval(count, nights, 0.95)
    return f"{100 * count / nights:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _curves(folders: Sequence[Path]) -> dict[tuple[str, int], LearningCurve]:
    curves = {}
    for folder in folders:
        run = read_run(folder, folder.name)
        curve = learning_curve(run)
        assert curve is not None, f"{folder} has no scores"
        variant = next(name for name in sorted(VARIANTS, key=len, reverse=True) if f"-{name}-" in folder.name)
        curves[variant, int(folder.name.rsplit("-", 1)[1])] = curve
    return curves


def main() -> None:
    """Fit, or simulate with what was fitted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fit", nargs="+", type=Path, metavar="RUN", help="folders of BF16's and one variant's trainings"
    )
    parser.add_argument("--nights", type=int, default=500)
    parser.add_argument("--seeds", type=int, help="of each variant (default: as tiny-nightly)")
    parser.add_argument("--out", type=Path, default=STORED)
    options = parser.parse_args()
    kept: list[Row] = json.loads(options.out.read_text()) if options.out.exists() else []
    measured = "fit" if options.fit else "simulation"
    rows = [row for row in kept if row["kind"] != measured]
    if options.fit:
        curves = _curves(options.fit)
        accuracies = [
            {"variant": variant, "seed": seed, "accuracy": [round(a, 4) for a in curve.accuracies]}
            for (variant, seed), curve in sorted(curves.items())
        ]
        model = fit(curves)
        (variant,) = {name for name, _ in curves} - {BASELINE}
        real = [Pair(curves[variant, seed], curves[BASELINE, seed]) for name, seed in sorted(curves) if name == variant]
        spreads = {
            "real": pair_spreads(real),
            "drawn": pair_spreads(drawn_pairs(model, len(real[0].baseline.prompts), 100)),
        }
        fitted = {"kind": "fit", "model": asdict(model), "pairs": spreads, "curves": accuracies, **provenance()}
        rows.insert(0, fitted)
        print(json.dumps({"pairs": spreads, **asdict(model)}, indent=1))
    else:
        config = load_config("tiny-nightly", {} if options.seeds is None else {"parity.seeds": options.seeds})
        model = Model(**next(row["model"] for row in kept if row["kind"] == "fit"))
        simulated = simulate(model, config.parity, config.evaluation.prompts, options.nights)
        rows += simulated
        print(f"\n{power_table(simulated)}")
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
