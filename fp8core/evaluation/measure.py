"""From verdicts to the numbers of an evaluation, and the differences of two of them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fp8core.evaluation.estimators import bootstrap_interval, majority_at_k, pass_at_k, wilson_interval
from fp8core.rewards.verdict import OUTCOMES, Verdict


@dataclass(frozen=True)
class Estimate:
    """A value, and the interval that its confidence belongs to."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PromptScore:
    """What the samples of one prompt came to.

    Attributes:
        prompt_id: see Problem.
        outcomes: outcome -> samples.
        measured: pass@k and maj@k of this prompt, by name.
    """

    prompt_id: str
    outcomes: dict[str, int]
    measured: dict[str, float]


@dataclass(frozen=True)
class Measurement:
    """An evaluation in one precision.

    Attributes:
        estimates: mean over prompts by name (`pass@1`, `maj@8`).
        outcomes: outcome -> samples, over all prompts.
        length_mean: tokens of a completion.
        prompts: each prompt, in the order of the data.
    """

    estimates: dict[str, Estimate]
    outcomes: dict[str, int]
    length_mean: float
    prompts: list[PromptScore]


@dataclass(frozen=True)
class Counting:
    """What is estimated: pass@k and maj@k for each k, with intervals of a confidence, resampled with a seed."""

    k: Sequence[int]
    confidence: float
    seed: int


def score_prompt(prompt_id: str, verdicts: Sequence[Verdict], k: Sequence[int]) -> PromptScore:
    """The samples of one prompt.

    Wrong samples vote by what their verdict says of the answer (`answer 17`), so that equal wrong answers stand
    together; what could not be read or checked has no vote.
    """
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    right, wrong = outcomes["right"], Counter(verdict.detail for verdict in verdicts if verdict.outcome == "wrong")
    silent = len(verdicts) - right - wrong.total()
    votes = sorted(wrong.values(), reverse=True)
    measured = {f"pass@{n}": pass_at_k(len(verdicts), right, n) for n in k}
    # One sample is its own majority.
    measured |= {f"maj@{n}": majority_at_k(right, votes, silent, n) for n in k if n > 1}
    return PromptScore(prompt_id, {name: outcomes[name] for name in OUTCOMES if outcomes[name]}, measured)


def measure(scores: Sequence[PromptScore], lengths: Sequence[int], counting: Counting) -> Measurement:
    """Means over prompts. With one sample a prompt the interval is Wilson's, else a bootstrap over prompts."""
    outcomes: Counter[str] = Counter()
    for score in scores:
        outcomes.update(score.outcomes)
    one_sample = outcomes.total() == len(scores)
    estimates = {}
    for name in scores[0].measured:
        values = [score.measured[name] for score in scores]
        if one_sample:
            interval = wilson_interval(round(math.fsum(values)), len(values), counting.confidence)
        else:
            interval = bootstrap_interval(values, counting.confidence, counting.seed)
        estimates[name] = Estimate(fmean(values), *interval)
    ordered: dict[str, int] = {name: outcomes[name] for name in OUTCOMES}
    return Measurement(estimates, ordered, fmean(lengths), list(scores))


def paired_differences(base: Measurement, other: Measurement, counting: Counting) -> dict[str, Estimate]:
    """`other` minus `base`, prompt by prompt: what two precisions share of a prompt's difficulty cancels out."""
    pairs = list(zip(base.prompts, other.prompts, strict=True))
    assert all(ours.prompt_id == theirs.prompt_id for ours, theirs in pairs), "both answered the same prompts"
    differences = {}
    for name in base.estimates:
        values = [theirs.measured[name] - ours.measured[name] for ours, theirs in pairs]
        differences[name] = Estimate(fmean(values), *bootstrap_interval(values, counting.confidence, counting.seed))
    return differences
