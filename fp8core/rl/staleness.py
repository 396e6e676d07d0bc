"""Policy lag of a run that generates ahead: by age of token, how far the policy before the update is from the writer's.

The age of a token is the version before the update minus the version that wrote it (decoupled PPO, arXiv 2110.00641). A
suffix `_age_A` limits a metric to tokens of an age, `_age_A_B` to ages from A to B; one without tokens is absent.
"""

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor

from fp8core.metric import Curve, Metric
from fp8core.rl.alignment_metrics import alignment_metrics
from fp8core.rl.correction import log_ratio
from fp8core.rl.losses import ClipRange

_LAG = ("ess", "sampling_importance_ratio", "k3_kl")
_POLICIES = "[alignment metric](numerics.md#alignment-metrics) of the policy before the update against the writer's"
METRICS = (
    Metric(
        "rollout/staleness_mean",
        "age of a token",
        unit="versions, mean of the step",
        headline="staleness",
        curve=Curve("ahead", "Staleness of tokens", include=(0.0, 1.0)),
    ),
    Metric(
        "rollout/staleness_max", "age of the oldest token", numbers={"staleness of tokens, largest (versions)": "max"}
    ),
    Metric("rollout/share_age_*", "share of the tokens"),
    Metric(
        "correction/ess",
        f"{_POLICIES}. *Falls with age: a smaller `pipeline.max_staleness` or learning rate.*",
        better="higher",
        headline="staleness_ess",
    ),
    *(Metric(f"correction/{name}", _POLICIES) for name in _LAG[1:]),
    *(Metric(f"correction/{name}_age_*", _POLICIES) for name in _LAG),
    Metric("correction/share_outside_clip_age_*", "ratios beyond `loss.clip_low`, `loss.clip_high`"),
)
"""What `staleness_metrics` returns, there without `rollout/`, and `lag_metrics`, without `correction/`."""

AGE_STARTS = (0, 1, 2, 3, 4, 8, 16, 32, 64, 128)


def by_age(ages: Tensor, mask: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Suffix and mask of each age, or range of ages, that an unmasked token has."""
    for start, stop in pairwise(AGE_STARTS):
        inside = mask & (ages >= start) & (ages < stop)
        if inside.any():
            yield f"age_{start}" if stop == start + 1 else f"age_{start}_{stop - 1}", inside


def lag_metrics(
    old: Tensor, rollout: Tensor, ages: Tensor, mask: Tensor, cap: float, clip: ClipRange
) -> dict[str, float]:
    """Weights of old over rollout policy, for all tokens and by age, and the share of each age beyond the clip.

    `old` and `rollout` are log-probs, float [B, T], `ages` int64 and `mask` bool [B, T]; `cap` as in
    `alignment_metrics`.
    """
    if not mask.any():
        return {}
    ratio = log_ratio(old, rollout, mask).exp()
    outside = clip.clip(ratio) != ratio
    metrics = _lag(old, rollout, mask, cap)
    for suffix, inside in by_age(ages, mask):
        metrics |= {f"{name}_{suffix}": value for name, value in _lag(old, rollout, inside, cap).items()}
        metrics[f"share_outside_clip_{suffix}"] = float(outside[inside].double().mean())
    return metrics


def _lag(old: Tensor, rollout: Tensor, mask: Tensor, cap: float) -> dict[str, float]:
    metrics = alignment_metrics(old, rollout, mask, cap)
    return {name: metrics[name] for name in _LAG}


def staleness_metrics(ages: Tensor, mask: Tensor) -> dict[str, float]:
    whole = ages[mask].double()
    shares = {f"share_{suffix}": int(inside.sum()) / len(whole) for suffix, inside in by_age(ages, mask)}
    return {"staleness_mean": float(whole.mean()), "staleness_max": float(whole.max()), **shares}
