"""Rejection filters: which tokens and rows are too far from the rollout policy to learn from at all.

With dc = d clamped to +-20, d = log p_training - log p_rollout, the divergence of a token is k1 = -dc, k2 = dc^2/2 or
k3 = exp(dc) - 1 - dc. A filter takes it per token, or as a row's sum, mean or maximum over its unmasked tokens:

| names                          | keeps                                     |
|--------------------------------|-------------------------------------------|
| {token,seq_sum,seq_mean}_k1    | low <= exp(-statistic) <= high            |
| {token,seq_sum,seq_mean}_k2/k3 | statistic <= high                         |
| seq_max_k2, seq_max_k3         | statistic <= high                         |

The band of k1 is on rho = p_training / p_rollout, as papers state it: exp(-k1) = rho for a token, its product over
the row for seq_sum, its geometric mean for seq_mean. verl's code tests 1/rho instead (pull request 6377), which is the
same for low = 1/high only. seq_sum filters reject by length: a ratio of 1.1 a token is a product of 13780 after 100.
Known compositions: seq_sum_k1 0.5_2.0 (MIS), seq_mean_k1 0.999_1.001 (geometric), seq_mean_k3 0.01 (K3).

Source: verl `docs/algo/rollout_corr_math.md`; the veto from slime `examples/train_infer_mismatch_helper/mis.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.alignment.divergences import clamp_exponent, k1, k2, k3
from fp8core.errors import UserError
from fp8core.rl.importance import row_mean


def _token(values: Tensor, mask: Tensor) -> Tensor:
    return values


def _row_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True)


def _row_max(values: Tensor, mask: Tensor) -> Tensor:
    # Only for divergences that are never negative: an empty row has 0.
    return torch.where(mask, values, 0.0).amax(dim=1, keepdim=True)


Statistic = Callable[[Tensor, Tensor], Tensor]
_STATISTICS: dict[str, Statistic] = {"token": _token, "seq_sum": _row_sum, "seq_mean": row_mean, "seq_max": _row_max}
_DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

FILTERS: tuple[str, ...] = tuple(
    f"{statistic}_{divergence}"
    for statistic in _STATISTICS
    for divergence in _DIVERGENCES
    if (statistic, divergence) != ("seq_max", "k1")
)
"""The eleven names."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """One test; `low` and `high` bound rho for k1, and `high` alone the divergence for k2 and k3."""

    name: str
    low: float = 0.0
    high: float

    def __post_init__(self) -> None:
        if self.name not in FILTERS:
            raise UserError(f"rejection filter {self.name!r} is not one of {', '.join(FILTERS)}")
        if not 0 < self.high < math.inf or not 0 <= self.low <= self.high:
            raise UserError(
                f"rejection filter {self.name}: low={self.low}, high={self.high}: 0 <= low <= high, high > 0"
            )
        if self.bounds_ratio and self.low == 0:
            raise UserError(f"rejection filter {self.name} needs a band low_high, both above 0")
        if not self.bounds_ratio and self.low != 0:
            raise UserError(f"rejection filter {self.name} takes one upper bound, not a band")

    @property
    def bounds_ratio(self) -> bool:
        """Whether the bounds are of the ratio rho (k1) or of the divergence (k2, k3)."""
        return self.name.endswith("_k1")

    def passes(self, d: Tensor, mask: Tensor) -> Tensor:
        """Bool [B, T]: unmasked tokens that pass; a row's test decides for all of its tokens."""
        level, divergence = self.name.rsplit("_", 1)
        statistic = _STATISTICS[level](_DIVERGENCES[divergence](clamp_exponent(d)), mask)
        if self.bounds_ratio:
            return mask & (-statistic >= math.log(self.low)) & (-statistic <= math.log(self.high))
        return mask & (statistic <= self.high)


def parse_filters(names: str, bounds: str) -> tuple[Filter, ...]:
    """Filters from verl's notation: names and bounds separated by commas, as `seq_mean_k1,seq_max_k2` and
    `0.999_1.001,2.5`. One bound serves all names; for k1 a single number `high` means the band 1/high to high.

    Raises UserError for an unknown name, a malformed bound, or bounds that are neither one nor as many as the names.
    """
    listed = [name.strip() for name in names.split(",")]
    values = [bound.strip() for bound in bounds.split(",")]
    if len(values) not in (1, len(listed)):
        raise UserError(f"{len(values)} bounds ({bounds}) for {len(listed)} rejection filters ({names})")
    if len(values) == 1:
        values *= len(listed)
    return tuple(_parse_filter(name, bound) for name, bound in zip(listed, values, strict=True))


def _parse_filter(name: str, bound: str) -> Filter:
    try:
        numbers = [float(part) for part in bound.split("_")]
    except ValueError:
        raise UserError(f"rejection filter {name}: bound {bound!r} is neither a number nor low_high") from None
    match numbers:
        case [low, high]:
            return Filter(name=name, low=low, high=high)
        case [high] if name.endswith("_k1") and high > 0:
            return Filter(name=name, low=1 / high, high=high)
        case [high]:
            return Filter(name=name, high=high)
    raise UserError(f"rejection filter {name}: bound {bound!r} has more than two numbers")


@dataclass(frozen=True, kw_only=True)
class Veto:
    """Rejects a row for one catastrophic token: rho below `low` or above `high`. d is not clamped here.

    One-sided (`high` infinite) it is slime's `rs_veto_threshold`; two-sided, SkyRL's outlier-token mask. The two-sided
    veto from tau to 1/tau is the filter seq_max_k2 <= log(tau)^2 / 2.
    """

    low: float
    high: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise UserError(f"veto bounds low={self.low}, high={self.high}: 0 < low <= high")

    def catastrophic(self, d: Tensor, mask: Tensor) -> Tensor:
        """Bool [B, T]: unmasked tokens outside the bounds."""
        return mask & ((d < math.log(self.low)) | (d > math.log(self.high)))
