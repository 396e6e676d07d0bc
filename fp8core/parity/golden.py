"""Preflight: log-ratios with known answers through the configured correction, before any training.

The answers are worked out here number by number, with the formulas of `rl.importance`, `rl.rejection` and
`rl.correction` and none of their code: what computes weights in a training must agree with them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from fp8core.config.run import RunConfig
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.correction import CorrectionRule
from fp8core.rl.importance import Weighting
from fp8core.rl.objective import Objective, named_correction
from fp8core.rl.rejection import Filter

VECTORS: tuple[tuple[float, ...], ...] = (
    (0.1, -1.5, 0.8, -10.0, 0.3),
    (0.0, 0.0, 0.0),
    (1.0, 0.75, -0.25, 0.5),
    (-0.7, -0.1, -0.4),
    (0.0004, -0.0003),
    (25.0, -25.0),
)
"""log p_training - log p_rollout of rows of tokens: the vector of divergences of docs/numerics.md, agreement, a policy
that became surer, one that became less sure, rounding, and both ends of the clamp."""
_CLAMP = 20.0
_TOLERANCE = 1e-4
_ROLLOUT_LOGPROB = -1.0

Corrected = Callable[[RolloutBatch], RolloutBatch]


@dataclass(frozen=True)
class Golden:
    """How a correction did: the number of tokens, and what differs from the answers, a line each."""

    tokens: int
    wrong: tuple[str, ...]


def preflight(config: RunConfig) -> Golden:
    """The correction that a training of `config` would apply."""
    objective = Objective(config.loss, config.correction)
    return compare_golden(lambda batch: objective.corrected(batch)[0], config)


def compare_golden(corrected: Corrected, config: RunConfig) -> Golden:
    """Compare what `corrected` makes of the vectors with the answers for the correction of `config`."""
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
    kept = [[_kept(named.rule, row, token) for token in range(len(row))] for row in VECTORS]
    if named.mode == "bypass" and "reinforce" not in (named.loss, config.loss.policy):
        # The clipped losses hold the mismatch in their ratio already.
        return [[float(keep) for keep in row] for row in kept]
    weights = [
        [_acted(named.rule.weighting, _raw(named.rule.weighting.level, row, token)) for token in range(len(row))]
        for row in VECTORS
    ]
    weights = [[w if k else 0.0 for w, k in zip(*rows, strict=True)] for rows in zip(weights, kept, strict=True)]
    factor = _factor(named.rule.normalise, weights, kept)
    return [[weight / factor for weight in row] for row in weights]


def _raw(level: str, row: Sequence[float], token: int) -> float:
    exponents = {"none": 0.0, "token": row[token], "sequence": sum(row), "geometric": fmean(row)}
    return math.exp(_clamped(exponents[level]))


def _acted(weighting: Weighting, w: float) -> float:
    low, high = weighting.low, weighting.high
    match weighting.action:
        case "truncate":
            return min(w, high)
        case "clip":
            return min(max(w, low), high)
        case "band" | "mask":
            return w if low <= w <= high else 0.0
        case _:
            return w


def _kept(rule: CorrectionRule, row: Sequence[float], token: int) -> bool:
    weighting = rule.weighting
    outside = not weighting.low <= _raw(weighting.level, row, token) <= weighting.high
    if weighting.action == "mask" and outside:
        return False
    if rule.veto is not None and not all(math.log(rule.veto.low) <= d <= math.log(rule.veto.high) for d in row):
        return False
    return all(_passes(test, row, token) for test in rule.filters)


def _passes(test: Filter, row: Sequence[float], token: int) -> bool:
    level, divergence = test.name.rsplit("_", 1)
    terms = [_divergence(divergence, _clamped(d)) for d in row]
    statistics = {"token": terms[token], "seq_sum": sum(terms), "seq_mean": fmean(terms), "seq_max": max(terms)}
    if divergence == "k1":
        return math.log(test.low) <= -statistics[level] <= math.log(test.high)
    return statistics[level] <= test.high


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
