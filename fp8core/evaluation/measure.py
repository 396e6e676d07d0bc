"""The numbers of an evaluation: pass@k, majority, their intervals, and differences of two evaluations.

Samples of one prompt are not independent of one another; prompts are. So every interval is over one value a prompt:
Wilson's for values that are right or wrong, else a bootstrap that resamples prompts.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from statistics import NormalDist, fmean
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, JsonValue
from scipy import stats

from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem
from fp8core.data.source import read_rows
from fp8core.errors import UserError
from fp8core.rewards.scorer import OUTCOMES, Verdict
from fp8core.rollout.registry import engine_entry

CONFIDENCE = 0.95
_RESAMPLES = 10_000


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k samples is right, estimated without bias from `samples` >= k.

    1 - C(samples - right, k) / C(samples, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1), in exact arithmetic.
    """
    assert 0 <= right <= samples, "right samples are among the samples"
    assert 1 <= k <= samples, "k samples are drawn from them"
    return float(1 - Fraction(math.comb(samples - right, k), math.comb(samples, k)))


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


def score_estimate(scores: Sequence[float], seed: int) -> Estimate:
    """Mean of one score a prompt: with Wilson's interval where each is 0 or 1, else resampled."""
    if {*scores} <= {0.0, 1.0}:
        # Honest near 0 and 1, too.
        wilson = stats.binomtest(scores.count(1.0), len(scores)).proportion_ci(CONFIDENCE, method="wilson")
        return Estimate(fmean(scores), float(wilson.low), float(wilson.high))
    return resampled_estimate(scores, (0.0, 1.0), seed)


def difference_estimate(differences: Sequence[float], seed: int) -> Estimate:
    """Mean of one difference a prompt: with an interval of pairs where each is -1, 0 or 1, else resampled.

    The interval is honest where none or few pairs differ. (Bonett and Price 2012, "Adjusted Wald confidence interval
    for a difference of binomial proportions based on paired data".)
    """
    if not {*differences} <= {-1.0, 0.0, 1.0}:
        return resampled_estimate(differences, (-1.0, 1.0), seed)
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    trials = len(differences) + 2
    more, fewer = ((differences.count(sign) + 1) / trials for sign in (1.0, -1.0))
    room = z * math.sqrt((more + fewer - (more - fewer) ** 2) / trials)
    return Estimate(fmean(differences), max(-1.0, more - fewer - room), min(1.0, more - fewer + room))


def resampled_estimate(values: Sequence[float], ends: tuple[float, float], seed: int) -> Estimate:
    """Mean of one value a prompt, with a percentile bootstrap that has a further prompt at each end of their range.

    Without these, equal values would have an interval of no width. (Bonett and Price, 2012, add them to pairs.) Values
    beyond the range are a user's own, and have none.
    """
    further = ends if ends[0] <= min(values) and max(values) <= ends[1] else ()
    interval = stats.bootstrap(
        (np.array([*values, *further]),),
        np.mean,
        n_resamples=_RESAMPLES,
        batch=256,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    mean = fmean(values)
    return Estimate(mean, min(float(interval.low), mean), max(float(interval.high), mean))


@dataclass(frozen=True)
class PromptScore:
    """The results of one prompt's samples: their number by outcome, and its pass@k and majority by name."""

    prompt_id: str
    outcomes: dict[str, int]
    measured: dict[str, float]


@dataclass(frozen=True)
class Measurement:
    """An evaluation in one precision: means over prompts by name (`pass@1`), and samples by outcome.

    `sources`: the means of each source, where the data is a list of several.
    """

    estimates: dict[str, Estimate]
    outcomes: dict[str, int]
    length_mean: float
    prompts: list[PromptScore]
    sources: dict[str, dict[str, Estimate]] = field(default_factory=dict)


def score_prompt(prompt_id: str, verdicts: Sequence[Verdict], k: Sequence[int]) -> PromptScore:
    """The samples of one prompt. Wrong ones vote by the detail of their verdict (`answer 17`); unread ones do not.

    `majority` is 1 where the most frequent answer is right; those in a tie share it. (Wang et al. 2022, arXiv
    2203.11171.)
    """
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    wrong = Counter(verdict.detail for verdict in verdicts if verdict.outcome == "wrong")
    votes = [outcomes["right"], *wrong.values()]
    values_by_name = {f"pass@{n}": pass_at_k(len(verdicts), outcomes["right"], n) for n in k}
    # One sample is its own majority.
    if len(verdicts) > 1:
        wins = votes[0] == max(votes) and votes[0] > 0
        values_by_name["majority"] = 1 / votes.count(votes[0]) if wins else 0.0
    return PromptScore(prompt_id, {name: outcomes[name] for name in OUTCOMES if outcomes[name]}, values_by_name)


def measure(
    scores: Sequence[PromptScore], lengths: Sequence[int], seed: int, sources: Sequence[str] = ()
) -> Measurement:
    """`sources`: of each score the name of its source, where the data is a list of several."""
    outcomes: dict[str, int] = {name: sum(score.outcomes.get(name, 0) for score in scores) for name in OUTCOMES}
    by_source = {name: [scores[i] for i, each in enumerate(sources) if each == name] for name in sorted({*sources})}
    estimates = {name: _estimates(some, seed) for name, some in by_source.items()}
    return Measurement(_estimates(scores, seed), outcomes, fmean(lengths), list(scores), estimates)


def _estimates(scores: Sequence[PromptScore], seed: int) -> dict[str, Estimate]:
    values = {name: [score.measured[name] for score in scores] for name in scores[0].measured}
    # All estimates have one kind of interval: pass@2 has no lower bound below that of pass@1.
    whole = {value for each in values.values() for value in each} <= {0.0, 1.0}
    estimate: Callable[..., Estimate] = score_estimate if whole else partial(resampled_estimate, ends=(0.0, 1.0))
    return {name: estimate(each, seed=seed) for name, each in values.items()}


def paired_differences(base: Measurement, other: Measurement, seed: int) -> dict[str, Estimate]:
    """`other` minus `base`, of the same prompts: what two precisions share of a prompt's difficulty cancels out."""
    differences = {}
    for name in base.estimates:
        pairs = zip(base.prompts, other.prompts, strict=True)
        values = [theirs.measured[name] - ours.measured[name] for ours, theirs in pairs]
        differences[name] = difference_estimate(values, seed)
    return differences


@dataclass(frozen=True)
class PartCost:
    """Distance of a policy's distributions from those of the same weights in BF16, at temperature 1.

    Attributes:
        nats: KL(BF16, it) a token of the prompts, the mean over tokens.
        median, worst: over texts, each with the mean of its prompt.
        same_choice: share of the prompts' tokens after which both have one most likely token.
        answer_nats: as `nats`, of the right answers' tokens; None where no text has one.
        answer_shift: log-probability of a right answer minus that in BF16, nats, the mean over texts; None likewise.
    """

    nats: float
    median: float
    worst: float
    same_choice: float
    answer_nats: float | None
    answer_shift: float | None


@dataclass(frozen=True)
class PartCosts:
    """The cost of each part of a recipe alone, and of `all` together (`evaluation.parts`).

    Attributes:
        texts, tokens: prompts, and their tokens.
        answers: texts with a right answer.
        answer_logprob: log-probability of a right answer in BF16, nats, the mean over texts.
    """

    texts: int
    tokens: int
    answers: int
    answer_logprob: float | None
    parts: dict[str, PartCost]


class EvaluationResult(BaseModel):
    """The result that `fp8-grpo evaluate --json` writes and MLflow keeps.

    step: of the run, None of a folder. weights_digest: of FP32 weights, where a run or an export names it. data_digest:
    SHA-256 over questions and references. engines: what the engine said it ran. differences: by precision, it minus the
    first one, paired by prompt. answer_logprobs: of a right answer by the engine, nats, the mean over prompts. The last
    two are measured on request.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    step: int | None
    weights_digest: str | None
    config: str
    data: str
    data_digest: str
    prompts: int
    samples: int
    temperature: float
    max_new_tokens: int
    seed: int
    verifier: dict[str, JsonValue]
    precisions: dict[str, Measurement]
    engines: dict[str, dict[str, JsonValue]]
    differences: dict[str, dict[str, Estimate]]
    answer_logprobs: dict[str, float] = {}
    parts: dict[str, PartCosts] = {}

    @property
    def name(self) -> str:
        """The last part of the target's path, also where that is `.`."""
        return os.path.basename(os.path.abspath(self.target))


Precision = Literal["configured", "bf16", "fp8"]


def all_problems(config: RunConfig, count: int | None) -> list[Problem]:
    """Different questions of a single source, all or the first `count` by prompt_id: a fair sample of a sorted file.

    Raises UserError: the data cannot be read, is generated without end, or has fewer.
    """
    (data,) = config.sources.values()
    if data.source == "chain":
        raise UserError("data: the chain task has no rows; omit data to ask its held-out questions")
    unique: dict[str, Problem] = {}
    for row in read_rows(data):
        unique.setdefault(row.whole_question, row)
    rows = sorted(unique.values(), key=lambda row: row.prompt_id)
    if count is not None and count > len(rows):
        raise UserError(f"{data.source}: prompts={count}, but there are only {len(rows)} different questions")
    return rows[:count]


def contract_in(precision: Precision, contract: PrecisionContract) -> PrecisionContract:
    """The contract with another rollout side; its head stays as configured."""
    head = contract.rollout.head
    sides = {
        "configured": contract.rollout,
        "bf16": SidePrecision(linear="bf16", kv_cache="bf16", head=head),
        "fp8": SidePrecision(linear="fp8_block", kv_cache="fp8", head=head),
    }
    return contract.model_copy(update={"rollout": sides[precision]})


def has_fp8(contract: PrecisionContract) -> bool:
    return contract.rollout.linear == "fp8_block" or contract.rollout.kv_cache == "fp8"


def compared_prompts(config: RunConfig) -> int:
    """The number of held-out prompts that are answered in FP8 and in BF16 at step 0; 0 where these are not compared."""
    has_policy = config.model is not None or config.warm_start is not None
    if not has_fp8(config.precision) or not has_policy or config.environment is not None:
        return 0
    exact = engine_entry(config).arithmetic(config) == "exact"
    return min(config.evaluation.precision_gap, config.evaluation.prompts) if exact else 0
