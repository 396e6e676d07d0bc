"""Metrics of the mismatch between the rollout policy and the trained policy, from log-probs of sampled tokens.

Tokens were sampled from the rollout policy g; p is the training policy. docs/reference/numerics.md has the formula,
ideal and origin of each metric. Per token d = log p - log g, w = exp(d). Exponents are clamped to +-20; sums are FP64.
Known deviations: NeMo RL clamps no exponent and takes sampling_importance_ratio after truncation. verl adds 1e-8 inside
ESS, which is then never exactly 1, and clamps no k3.

Divergences (`k1` to `jensen_shannon_k3`) are functions of d = log p(token) - log q(token) for tokens sampled from q, of
any shape: elementwise, differentiable, unclamped (J. Schulman, "Approximating KL Divergence", 2020).
"""

import math

import numpy as np
import torch
from torch import Tensor

EXPONENT_BOUND = 20.0
POSITION_STARTS = (0, 16, 64, 256, 1024)
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


def clamp_exponent(d: Tensor) -> Tensor:
    """`d` limited to +-20, so that exp(d) lies between 2e-9 and 5e8."""
    return d.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)


def k1(d: Tensor) -> Tensor:
    """-d: unbiased for KL(q || p), any sign."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: never negative; biased for KL(q || p), of order d^3."""
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


def alignment_metrics(training: Tensor, rollout: Tensor, mask: Tensor, cap: float = 2.0) -> dict[str, float]:
    """Every metric of a batch; the order of its rows and their padding do not change a single bit.

    Args:
        training, rollout: log-probs of the sampled tokens under both policies, float [B, T], natural log.
        mask: bool [B, T], true where the rollout policy wrote the token; elsewhere any value is allowed.
        cap: truncation cap C of the importance weights (ess, rollout_is_*, fraction_high, fraction_low).

    Raises ValueError: there is no unmasked token, or one has NaN or infinity.
    """
    assert cap >= 1, f"cap={cap}: the truncation cap of importance weights"
    training, rollout = training.detach(), rollout.detach()
    _check(training, rollout, mask)
    lengths = mask.sum(dim=1).cpu()
    lengths = lengths[lengths > 0]
    if not len(lengths):
        raise ValueError("no unmasked token: alignment metrics of an empty batch are undefined")
    training, rollout = training[mask].double().cpu(), rollout[mask].double().cpu()
    d = training - rollout
    ranked = _ranked(d)
    differing = training.float().view(torch.int32) != rollout.float().view(torch.int32)
    return {
        "tokens": float(d.numel()),
        "sequences": float(lengths.numel()),
        "tokens_differing": float(differing.sum()),
        "approx_entropy": _mean(_ranked(-clamp_exponent(d).exp() * training)),
        **_divergences(ranked),
        **_weights(ranked, cap),
        **_differences(ranked),
        **_by_position(d, lengths),
        **_by_sequence(training, rollout, lengths),
    }


def _check(training: Tensor, rollout: Tensor, mask: Tensor) -> None:
    assert mask.dtype == torch.bool, f"mask is {mask.dtype}, not bool"
    assert training.ndim == 2, "log-probs are [sequences, tokens]"
    assert training.shape == rollout.shape == mask.shape, "log-probs and mask differ in shape"
    for side, logprobs in (("training", training), ("rollout", rollout)):
        assert logprobs.dtype in (torch.float32, torch.float64), f"{side} log-probs are {logprobs.dtype}"
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


def _by_position(d: Tensor, lengths: Tensor) -> dict[str, float]:
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    positions, result = torch.arange(len(starts)) - starts, {}
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
