"""Metrics of the mismatch between the rollout policy and the trained policy, from log-probs of sampled tokens.

Tokens were sampled from the rollout policy g; p is the training policy and m = (p + g) / 2. Per token
d = log p - log g, w = exp(d), v = min(w, C) with the truncation cap C. `mean` is over the unmasked tokens, `rows` over
the sequences that have one; D is a row's mean of -d. Every exponent is clamped to +-20; sums are FP64.
"Unbiased" is meant of the sum over tokens, for divergences of next-token distributions at prefixes that g wrote. The
mean divides it by a token count that is random too.

| name                               | formula                     | ideal | estimates                   | used by    |
|------------------------------------|-----------------------------|-------|-----------------------------|------------|
| token_mult_prob_error              | mean exp(|d|)               | 1     | heavy tail                  | NeMo       |
| token_mult_prob_error_pos_A_B      | same, A..B of each row      | 1     | absent without such tokens  |            |
| {max,mean,min}_seq_mult_prob_error | row means of exp(|d|)       | 1     |                             | NeMo       |
| kl                                 | mean -d (k1)                | 0     | KL(g,p), unbiased, signed   | verl       |
| k2_kl                              | mean d^2/2                  | 0     | KL(g,p), biased: order d^3  |            |
| k3_kl, gen_kl_error                | mean exp(d)-1-d             | 0     | KL(g,p), unbiased, >= 0     | verl, NeMo |
| policy_kl_error                    | mean exp(-d)-1+d            | 0     | KL(p,g), biased: g's tokens | NeMo       |
| reverse_kl                         | mean w d                    | 0     | KL(p,g), unbiased, signed   |            |
| reverse_k2_kl                      | mean w d^2/2                | 0     | KL(p,g), biased: order d^3  |            |
| reverse_k3_kl                      | mean w (exp(-d)-1+d)        | 0     | KL(p,g), unbiased, >= 0     |            |
| js_divergence                      | w log p/m + log g/m, half   | 0     | JS(p,g), unbiased, >= 0     |            |
| js_divergence_error                | k3 of both logs, half       | 0     | JS, biased: not m's tokens  | NeMo       |
| sampling_importance_ratio          | mean w                      | 1     | expectation 1 for any p     | NeMo       |
| sampling_importance_ratio_seq      | rows: mean exp(sum d)       | 1     | expectation 1 for any p     | NeMo       |
| chi2_token                         | mean w^2 - 1                | 0     | chi2(p,g), unbiased         | verl       |
| chi2_seq                           | rows: mean exp(2 sum d) - 1 | 0     | chi2 of rows, unbiased      | verl       |
| ess                                | (mean v)^2 / mean v^2       | 1     | biased: ratio of two means  | verl       |
| rollout_is_{mean,std,min,max}      | of v; population std        | 1, 0  | biased by the truncation    | verl       |
| fraction_high, fraction_low        | share of w > C; of w < 1/C  | 0     | raw w: v never exceeds C    | verl       |
| share_outside_0.9_1.1              | share of w outside          | 0     |                             |            |
| seq_max_deviation                  | rows: max |mean w - 1|      | 0     | raw w, not truncated        | verl       |
| {training,rollout}_log_ppl         | rows: mean -log p; -log g   |       | cross-entropy; entropy of g | verl       |
| {training,rollout}_ppl             | rows: mean exp of the same  |       | biased: exp of a mean       | verl       |
| log_ppl_diff[_max,_min]            | rows: mean (max, min) of D  | 0     | KL(g,p), biased by lengths  | verl       |
| log_ppl_abs_diff                   | rows: mean |D|              | 0     |                             | verl       |
| ppl_ratio                          | rows: mean exp(D)           | 1     | inverse geometric weight    | verl       |
| approx_entropy                     | mean -w log p               |       | entropy of p, unbiased      | NeMo       |
| logprob_abs_diff[_max]             | mean (max) of |d|           | 0     |                             | slime      |
| abs_diff_{p50,p95,p99,p99.9,max}   | nearest rank of |d|         | 0     |                             |            |
| tokens, sequences                  | unmasked; not empty         |       |                             |            |
| tokens_differing                   | FP32 p, g not bit-equal     | 0     |                             |            |

Known deviations: NeMo RL (NeMo above) clamps no exponent and takes sampling_importance_ratio after truncation. verl
adds 1e-8 inside ESS, which is then never exactly 1, and clamps no k3.

The divergence estimates (`k1` to `jensen_shannon_k3`) are functions of one log-ratio d = log p(token) - log q(token)
for tokens sampled from q, of any shape. Each is elementwise, differentiable and unclamped: callers pass
`clamp_exponent(d)` where an exponential could overflow. Source: J. Schulman, "Approximating KL Divergence" (2020).
"""

import math

import numpy as np
import torch
from torch import Tensor

EXPONENT_BOUND = 20.0


def clamp_exponent(d: Tensor) -> Tensor:
    """`d` limited to +-20, so that exp(d) lies between 2e-9 and 5e8."""
    return d.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)


def k1(d: Tensor) -> Tensor:
    """-d: unbiased for KL(q || p), any sign."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: never negative; biased for KL(q || p), by the third order of d."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """exp(d) - 1 - d: unbiased for KL(q || p), never negative."""
    # exp(d) - 1 would lose the digits of small d.
    return torch.expm1(d) - d


def jensen_shannon(d: Tensor) -> Tensor:
    """Unbiased for JS(p, q) = KL(p||m)/2 + KL(q||m)/2, m = (p+q)/2, by weighting the p half with exp(d); >= 0."""
    p_over_m, q_over_m = _against_mixture(d)
    # For d below 1e-11 the two halves cancel to rounding errors of either sign.
    return ((torch.exp(d) * p_over_m + q_over_m) / 2).clamp_min(0)


def jensen_shannon_k3(d: Tensor) -> Tensor:
    """NeMo RL's form: the mean of k3(log p/m) and k3(log q/m). Not JS: it estimates neither half under q."""
    p_over_m, q_over_m = _against_mixture(d)
    return (k3(p_over_m) + k3(q_over_m)) / 2


def _against_mixture(d: Tensor) -> tuple[Tensor, Tensor]:
    """log p/m and log q/m for the mixture m = (p+q)/2; exactly 0 at d = 0."""
    return -torch.log1p(torch.expm1(-d) / 2), -torch.log1p(torch.expm1(d) / 2)


POSITION_STARTS = (0, 16, 64, 256, 1024)
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


class AlignmentAccumulator:
    """Streams micro-batches; holds 16 bytes per unmasked token until `result`, for exact quantiles."""

    def __init__(self, cap: float = 2.0) -> None:
        """`cap`: truncation cap C of the importance weights (ess, rollout_is_*, fraction_high, fraction_low)."""
        if not cap >= 1:
            raise ValueError(f"cap={cap}: the truncation cap of importance weights must be at least 1")
        self._cap = cap
        self._training: list[Tensor] = []
        self._rollout: list[Tensor] = []
        self._lengths: list[Tensor] = []

    def add(self, training: Tensor, rollout: Tensor, mask: Tensor) -> None:
        """Add sequences.

        `training`, `rollout`: log-probs of the sampled tokens under both policies, float [B, T], natural log.
        `mask`: bool [B, T], true where the rollout policy wrote the token; elsewhere any value is allowed.
        Raises ValueError for wrong shapes or dtypes and for a NaN or infinity at an unmasked position.
        """
        training, rollout = training.detach(), rollout.detach()
        _check(training, rollout, mask)
        self._training.append(training[mask].double().cpu())
        self._rollout.append(rollout[mask].double().cpu())
        self._lengths.append(mask.sum(dim=1).cpu())

    def result(self) -> dict[str, float]:
        """Every metric of the module's table over all sequences added; ValueError when no token was unmasked.

        The split into `add` calls, the order of the rows and the padding do not change a single bit.
        """
        if sum(chunk.numel() for chunk in self._training) == 0:
            raise ValueError("no unmasked token: alignment metrics of an empty batch are undefined")
        training, rollout = torch.cat(self._training), torch.cat(self._rollout)
        lengths = torch.cat(self._lengths)
        lengths = lengths[lengths > 0]
        d = training - rollout
        ranked = _ranked(d)
        return {
            "tokens": float(d.numel()),
            "sequences": float(lengths.numel()),
            "tokens_differing": float(_differing(training, rollout)),
            "approx_entropy": _mean(_ranked(-clamp_exponent(d).exp() * training)),
            **_divergences(ranked),
            **_weights(ranked, self._cap),
            **_differences(ranked),
            **_by_position(d, _positions(lengths)),
            **_by_sequence(training, rollout, lengths),
        }


def alignment_metrics(training: Tensor, rollout: Tensor, mask: Tensor, cap: float = 2.0) -> dict[str, float]:
    """Every metric of the module's table for one batch; arguments and errors as `AlignmentAccumulator.add`."""
    accumulator = AlignmentAccumulator(cap)
    accumulator.add(training, rollout, mask)
    return accumulator.result()


def _check(training: Tensor, rollout: Tensor, mask: Tensor) -> None:
    if training.ndim != 2 or training.shape != rollout.shape or training.shape != mask.shape:
        shapes = f"training {list(training.shape)}, rollout {list(rollout.shape)}, mask {list(mask.shape)}"
        raise ValueError(f"log-probs and mask must share one shape [sequences, tokens]: {shapes}")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, not {mask.dtype}")
    for side, logprobs in (("training", training), ("rollout", rollout)):
        if logprobs.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{side} log-probs must be float32 or float64, not {logprobs.dtype}")
        bad = (mask & ~logprobs.isfinite()).nonzero()
        if len(bad):
            row, position = bad[0].tolist()
            value = logprobs[row, position].item()
            raise ValueError(f"{side} log-prob at row {row}, position {position} is {value}, and it is not masked")


def _ranked(values: Tensor) -> Tensor:
    """FP64 values [N] in ascending order: sums over them do not depend on the order of the rows."""
    # Several times as fast as torch's sort, which also finds out where each value was.
    return torch.from_numpy(np.sort(values.numpy()))


def _mean(values: Tensor) -> float:
    return values.mean().item()


def _differing(training: Tensor, rollout: Tensor) -> int:
    return int((training.float().view(torch.int32) != rollout.float().view(torch.int32)).sum())


def _divergences(d: Tensor) -> dict[str, float]:
    bounded = clamp_exponent(d)
    w, forward, backward = bounded.exp(), k3(bounded), k3(-bounded)
    return {
        "token_mult_prob_error": _mean(bounded.abs().exp()),
        "kl": _mean(k1(d)),
        "k2_kl": _mean(k2(d)),
        "k3_kl": _mean(forward),
        "gen_kl_error": _mean(forward),
        "policy_kl_error": _mean(backward),
        "reverse_kl": _mean(w * d),
        "reverse_k2_kl": _mean(w * k2(d)),
        "reverse_k3_kl": _mean(w * backward),
        "js_divergence": _mean(jensen_shannon(bounded)),
        "js_divergence_error": _mean(jensen_shannon_k3(bounded)),
        "chi2_token": _mean(torch.expm1(2 * bounded)),
    }


def _weights(d: Tensor, cap: float) -> dict[str, float]:
    w = clamp_exponent(d).exp()
    truncated = w.clamp(max=cap)
    mean = truncated.mean()
    return {
        "sampling_importance_ratio": _mean(w),
        "ess": (mean.square() / truncated.square().mean()).item(),
        "rollout_is_mean": mean.item(),
        "rollout_is_std": _mean((truncated - mean).square()) ** 0.5,
        "rollout_is_min": truncated.min().item(),
        "rollout_is_max": truncated.max().item(),
        "fraction_high": _mean((w > cap).double()),
        "fraction_low": _mean((w < 1 / cap).double()),
        "share_outside_0.9_1.1": _mean(((w < 0.9) | (w > 1.1)).double()),
    }


def _differences(d: Tensor) -> dict[str, float]:
    ranked = _ranked(d.abs())
    quantiles = {f"abs_diff_{name}": ranked[math.ceil(q * len(ranked)) - 1].item() for name, q in QUANTILES.items()}
    largest = ranked[-1].item()
    return {"logprob_abs_diff": _mean(ranked), "logprob_abs_diff_max": largest, **quantiles, "abs_diff_max": largest}


def _positions(lengths: Tensor) -> Tensor:
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(len(starts)) - starts


def _by_position(d: Tensor, positions: Tensor) -> dict[str, float]:
    result = {}
    for start, stop in zip(POSITION_STARTS, (*POSITION_STARTS[1:], None), strict=True):
        inside = positions >= start if stop is None else (positions >= start) & (positions < stop)
        if inside.any():
            name = f"token_mult_prob_error_pos_{start}_{'up' if stop is None else stop - 1}"
            result[name] = _mean(clamp_exponent(_ranked(d[inside])).abs().exp())
    return result


def _by_sequence(training: Tensor, rollout: Tensor, lengths: Tensor) -> dict[str, float]:
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)

    def row_sum(values: Tensor) -> Tensor:
        return torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, rows, values)

    def mean(values: Tensor) -> float:
        return _mean(_ranked(values))

    d = training - rollout
    bounded = clamp_exponent(d)
    total = clamp_exponent(row_sum(d))
    errors = row_sum(bounded.abs().exp()) / lengths
    log_ppl, log_ppl_rollout = row_sum(-training) / lengths, row_sum(-rollout) / lengths
    log_ppl_diff = row_sum(-d) / lengths
    return {
        "max_seq_mult_prob_error": errors.max().item(),
        "mean_seq_mult_prob_error": mean(errors),
        "min_seq_mult_prob_error": errors.min().item(),
        "seq_max_deviation": (row_sum(bounded.exp()) / lengths - 1).abs().max().item(),
        "sampling_importance_ratio_seq": mean(total.exp()),
        "chi2_seq": mean(torch.expm1(2 * total)),
        "training_log_ppl": mean(log_ppl),
        "rollout_log_ppl": mean(log_ppl_rollout),
        "training_ppl": mean(clamp_exponent(log_ppl).exp()),
        "rollout_ppl": mean(clamp_exponent(log_ppl_rollout).exp()),
        "log_ppl_diff": mean(log_ppl_diff),
        "log_ppl_abs_diff": mean(log_ppl_diff.abs()),
        "log_ppl_diff_max": log_ppl_diff.max().item(),
        "log_ppl_diff_min": log_ppl_diff.min().item(),
        "ppl_ratio": mean(clamp_exponent(log_ppl_diff).exp()),
    }
