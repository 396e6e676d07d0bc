"""Metrics of the mismatch between the rollout policy and the trained policy, from log-probs of sampled tokens.

Tokens were sampled from the rollout policy g; p is the training policy. `METRICS` has the formula, ideal and origin of
each metric. Per token d = log p - log g, w = exp(d). Exponents are clamped to +-20; sums are FP64.
Known deviations: NeMo RL clamps no exponent; verl adds 1e-8 inside ESS, which is then never exactly 1, and clamps no
k3. `k1` to `k3` are elementwise, differentiable and unclamped (J. Schulman, "Approximating KL Divergence", 2020).
"""

import math

import numpy as np
import torch
from torch import Tensor

from fp8core.metric import Column, Curve, Metric

COMPARED_TOKENS = Metric("alignment/tokens", "unmasked")
# NeMo RL judges its nightly runs by 1.05 in BF16 and 1.1 in FP8, and calls KL errors below 1e-3 acceptable
# (docs/guides/grpo.md and docs/adding-new-models.md there).
TMPE = Metric(
    "alignment/token_mult_prob_error",
    "`mean exp(|d|)`; heavy tail; as NeMo",
    better="lower",
    ideal=1.0,
    headline="3_error_minus_1",
    headline_from_ideal=True,
    of_checkpoint=True,
    form="exact",
    curve=Curve(
        "alignment",
        "Token multiplicative probability error - 1",
        y_label="mean exp|d| - 1",
        log=True,
        bounds={"NeMo RL, BF16: 0.05": 0.05, "NeMo RL, FP8: 0.1": 0.1},
        note="d = log p - log g of a token: training policy p, rollout policy g. 0: equal bit for bit.",
    ),
    column=Column("tmpe", 9),
    numbers={"token multiplicative probability error, largest": "max"},
)
K3 = Metric(
    "alignment/k3_kl",
    "`mean exp(d)-1-d`; KL(g,p), unbiased, >= 0; as verl, NeMo",
    unit="k3 estimate of KL(g, p), nats",
    better="lower",
    ideal=0.0,
    headline="4_k3",
    of_checkpoint=True,
    curve=Curve(
        "alignment", "Divergence of training from rollout policy (k3)", log=True, bounds={"NeMo RL: 0.001": 1e-3}
    ),
    numbers={"k3 divergence, largest (nats)": "max"},
)
ESS = Metric(
    "alignment/ess",
    "`(mean v)^2 / mean v^2`; biased: ratio of two means; as verl",
    better="higher",
    ideal=1.0,
    headline="ess",
    form="exact",
    curve=Curve(
        "alignment",
        "Effective sample size that is lost",
        y_label="1 - ESS / tokens",
        log=True,
        note="Of importance weights truncated at 2; 0: all weights are equal.",
    ),
    numbers={"effective sample size, smallest": "min"},
)
_SHARE = Curve(
    "alignment",
    "Tokens that differ",
    y_label="share that is not bit-equal",
    over=COMPARED_TOKENS.name,
    include=(0.0, 1.0),
)
TOKENS_DIFFERING = Metric(
    "alignment/tokens_differing",
    "FP32 p, g not bit-equal",
    better="lower",
    ideal=0.0,
    of_checkpoint=True,
    form="whole",
    curve=_SHARE,
    column=Column("differ", 6),
    numbers={"tokens whose log-probs differ": "sum"},
)
_WORST = Curve("alignment", "Largest difference of a token", y_label="max |d| of the step, nats", log=True)
METRICS = (
    TMPE,
    Metric("alignment/token_mult_prob_error_pos_*", "same, tokens A to B of each row; absent without", ideal=1.0),
    Metric("alignment/max_seq_mult_prob_error", "`largest row mean of exp(|d|)`; as NeMo", ideal=1.0),
    Metric("alignment/kl", "`mean -d (k1)`; KL(g,p), unbiased, signed; as verl", ideal=0.0),
    K3,
    Metric("alignment/sampling_importance_ratio", "`mean w`; expectation 1 for any p; as NeMo", ideal=1.0),
    ESS,
    Metric("alignment/logprob_abs_diff", "`mean |d|`; as slime", ideal=0.0),
    Metric("alignment/abs_diff_p99", "`nearest rank of |d|`", ideal=0.0),
    COMPARED_TOKENS,
    TOKENS_DIFFERING,
    Metric("alignment/logprob_abs_diff_max", "`max |d|`; as slime", ideal=0.0, curve=_WORST),
)
"""What `alignment_metrics` returns, there without `alignment/`."""

EXPONENT_BOUND = 20.0
POSITION_STARTS = (0, 16, 64, 256, 1024)


def clamp_exponent(d: Tensor) -> Tensor:
    """`d` limited to +-20, so that exp(d) lies between 2e-9 and 5e8."""
    return d.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)


def k1(d: Tensor) -> Tensor:
    """-d: unbiased for KL(g || p), any sign."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: never negative; biased for KL(g || p), of order d^3."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """exp(d) - 1 - d: unbiased for KL(g || p), never negative."""
    # exp(d) - 1 would lose the digits of small d.
    return torch.expm1(d) - d


def alignment_metrics(training: Tensor, rollout: Tensor, mask: Tensor, cap: float = 2.0) -> dict[str, float]:
    """Every metric of a batch; the order of its rows and their padding do not change a single bit.

    Args:
        training, rollout: log-probs of the sampled tokens under both policies, float [B, T], natural log.
        mask: bool [B, T], true where the rollout policy wrote the token; elsewhere any value is allowed.
        cap: importance weights are truncated at this in `ess`.

    Raises ValueError: there is no unmasked token, or one has NaN or infinity.
    """
    assert cap >= 1, f"cap={cap}: the truncation cap of importance weights"
    training = training.detach()
    rollout = rollout.detach()
    _check(training, rollout, mask)
    lengths = mask.sum(dim=1).cpu()
    lengths = lengths[lengths > 0]
    if not len(lengths):
        raise ValueError("no unmasked token: alignment metrics of an empty batch are undefined")
    training = training[mask].double().cpu()
    rollout = rollout[mask].double().cpu()
    d = training - rollout
    differences = _ascending(d)
    exponents = clamp_exponent(differences)
    sizes = _ascending(differences.abs())
    w = exponents.exp()
    truncated_weights = w.clamp(max=cap)
    differing = training.float().view(torch.int32) != rollout.float().view(torch.int32)
    return {
        "tokens": float(d.numel()),
        "tokens_differing": float(differing.sum()),
        "token_mult_prob_error": _mean(exponents.abs().exp()),
        "kl": _mean(k1(differences)),
        "k3_kl": _mean(k3(exponents)),
        "sampling_importance_ratio": _mean(w),
        "ess": (truncated_weights.mean().square() / truncated_weights.square().mean()).item(),
        "logprob_abs_diff": _mean(sizes),
        "logprob_abs_diff_max": sizes[-1].item(),
        "abs_diff_p99": sizes[math.ceil(0.99 * len(sizes)) - 1].item(),
        **_by_position(d, lengths),
        "max_seq_mult_prob_error": _row_means(clamp_exponent(d).abs().exp(), lengths).max().item(),
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


def _ascending(values: Tensor) -> Tensor:
    """FP64 values [N] in ascending order: sums over them do not depend on the order of the rows."""
    # Several times as fast as torch's sort, which also finds out where each value was.
    return torch.from_numpy(np.sort(values.numpy()))


def _mean(values: Tensor) -> float:
    return values.mean().item()


def _by_position(d: Tensor, lengths: Tensor) -> dict[str, float]:
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    positions = torch.arange(len(starts)) - starts
    result = {}
    for start, stop in zip(POSITION_STARTS, (*POSITION_STARTS[1:], None), strict=True):
        inside = positions >= start if stop is None else (positions >= start) & (positions < stop)
        if inside.any():
            name = f"token_mult_prob_error_pos_{start}_{'up' if stop is None else stop - 1}"
            result[name] = _mean(clamp_exponent(_ascending(d[inside])).abs().exp())
    return result


def _row_means(values: Tensor, lengths: Tensor) -> Tensor:
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    return torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, rows, values) / lengths
