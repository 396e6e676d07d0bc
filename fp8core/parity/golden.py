"""Preflight: log-ratios with known answers through the configured correction, before any training.

The answers are worked out here number by number, with the formulas of `rl.correction` and none of its
code. The code that computes weights in a training must agree with them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from fp8core.config.run import RunConfig
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.correction import CorrectionRule, Filter, Weighting
from fp8core.rl.objective import Objective, named_correction

VECTORS: tuple[tuple[float, ...], ...] = (
    (0.1, -1.5, 0.8, -10.0, 0.3),
    (0.0, 0.0, 0.0),
    (1.0, 0.75, -0.25, 0.5),
    (-0.7, -0.1, -0.4),
    (0.0004, -0.0003),
    (25.0, -25.0),
)
"""log p_training - log p_rollout of rows of tokens: the vector of divergences of docs/reference/numerics.md, agreement,
a policy that became surer, one that became less sure, rounding, and both ends of the clamp."""
_CLAMP = 20.0
_TOLERANCE = 1e-4
_ROLLOUT_LOGPROB = -1.0

Corrected = Callable[[RolloutBatch], RolloutBatch]


@dataclass(frozen=True)
class Golden:
    """The result of a correction: the number of tokens, and what differs from the answers, a line each."""

    tokens: int
    wrong: tuple[str, ...]


def preflight(config: RunConfig) -> Golden:
    objective = Objective(config.loss, config.correction)
    return compare_golden(lambda batch: objective.corrected(batch)[0], config)


def compare_golden(corrected: Corrected, config: RunConfig) -> Golden:
    found = corrected(golden_batch()).weights
    assert found is not None, "a corrected batch has weights"
    wrong = []
    for row, answers in enumerate(answers_of(config)):
        for token, answer in enumerate(answers):
            weight = float(found[row, token])
            if not math.isclose(weight, answer, rel_tol=_TOLERANCE, abs_tol=1e-7):
                wrong.append(f"d={VECTORS[row]}, token {token}: weight {weight:.6g}, must be {answer:.6g}")
    return Golden(sum(len(row) for row in VECTORS), tuple(wrong))


def golden_batch() -> RolloutBatch:
    """The vectors as a batch, padded on the right; log-probs of the rollout policy are all -1."""
    longest = max(len(row) for row in VECTORS)
    d = torch.tensor([[*row, *[math.nan] * (longest - len(row))] for row in VECTORS])
    mask = ~d.isnan()
    return RolloutBatch(
        sequences=TokenBatch.of([[0]] * len(VECTORS), [[0] * len(row) for row in VECTORS]),
        mask=mask,
        rollout_logprobs=torch.full_like(d, _ROLLOUT_LOGPROB),
        old_logprobs=d + _ROLLOUT_LOGPROB,
        reference_logprobs=None,
        advantages=torch.zeros(len(VECTORS)),
        keep=torch.ones(len(VECTORS), dtype=torch.bool),
    )


def answers_of(config: RunConfig) -> list[list[float]]:
    """The weight of each token of VECTORS under the correction of `config`; 0 for what it rejects."""
    named = named_correction(config.correction)
    rows = [_row(named.rule, row) for row in VECTORS]
    kept = [[keep for _, keep in row] for row in rows]
    if named.mode == "bypass" and "reinforce" not in (named.loss, config.loss.policy):
        # The clipped losses hold the mismatch in their ratio already.
        return [[float(keep) for keep in row] for row in kept]
    over = kept if named.rule.normalise_over == "kept" else [[True] * len(row) for row in rows]
    factor = _factor(named.rule.normalise, [[w for w, _ in row] for row in rows], over)
    return [[w / factor if keep else 0.0 for w, keep in row] for row in rows]


def _row(rule: CorrectionRule, row: Sequence[float]) -> list[tuple[float, bool]]:
    """The weight of each token, were it kept, and whether it is."""
    everything = [True] * len(row)
    vetoed = rule.veto is not None and not all(math.log(rule.veto.low) <= d <= math.log(rule.veto.high) for d in row)
    kept = [not vetoed] * len(row)
    for test in rule.filters:
        seen = kept if rule.order == "in_turn" else everything
        kept = [keep and passed for keep, passed in zip(kept, _passes(test, row, seen), strict=True)]
    seen = kept if rule.order == "in_turn" else everything
    weighting = rule.weighting
    answers = []
    for token, keep in enumerate(kept):
        raw = _raw(weighting.level, row, seen, token)
        outside = not weighting.low <= raw <= weighting.high
        answers.append((_acted(weighting, raw), keep and not (weighting.action == "mask" and outside)))
    return answers


def _raw(level: str, row: Sequence[float], seen: Sequence[bool], token: int) -> float:
    # A row that is rejected as a whole has the weight of all its tokens.
    looked = [d for d, s in zip(row, seen, strict=True) if s] or row
    exponents = {"none": 0.0, "token": row[token], "sequence": sum(looked), "geometric": fmean(looked)}
    return math.exp(_clamped(exponents[level]))


def _acted(weighting: Weighting, w: float) -> float:
    low, high = weighting.low, weighting.high
    match weighting.action:
        case "truncate":
            return min(w, high)
        case "clip":
            return min(max(w, low), high)
        case "band":
            return w if low <= w <= high else 0.0
        case _:
            return w


def _passes(test: Filter, row: Sequence[float], seen: Sequence[bool]) -> list[bool]:
    level, divergence = test.name.rsplit("_", 1)
    terms = [_divergence(divergence, d if test.clamp == "row" else _clamped(d)) for d in row]
    looked = [term for term, s in zip(terms, seen, strict=True) if s] or [0.0]
    of_row = {"seq_sum": sum(looked), "seq_mean": fmean(looked), "seq_max": max(looked)}
    statistics = terms if level == "token" else [of_row[level]] * len(row)
    if divergence == "k1":
        return [math.log(test.low) <= -statistic <= math.log(test.high) for statistic in statistics]
    return [statistic <= test.high for statistic in statistics]


def _divergence(name: str, d: float) -> float:
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[name]


def _clamped(exponent: float) -> float:
    return min(max(exponent, -_CLAMP), _CLAMP)


def _factor(name: str, weights: Sequence[Sequence[float]], kept: Sequence[Sequence[bool]]) -> float:
    rows = [[w for w, k in zip(*pair, strict=True) if k] for pair in zip(weights, kept, strict=True)]
    rows = [row for row in rows if row]
    if name == "none" or not rows:
        return 1.0
    means = [fmean(row) for row in rows]
    factor = fmean(w for row in rows for w in row) if name == "token" else fmean(means)
    return factor if factor > 1e-8 else 1.0
