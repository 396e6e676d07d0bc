"""Confidence interval of a mean over few seeds (Student's t)."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Interval of the mean of independent values; at least two."""
    assert len(values) > 1, "a spread needs two values"
    half = t_quantile(0.5 + confidence / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def t_quantile(probability: float, degrees: int) -> float:
    """The value that a t-distributed variable stays below with `probability` (0.5 to 1, exclusive)."""
    assert 0.5 <= probability < 1, "the upper half"
    low, high = 0.0, 1.0
    while _central(high, degrees) < 2 * probability - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, degrees) < 2 * probability - 1 else (low, middle)
    return high


def _central(t: float, degrees: int) -> float:
    """P(|T| <= t) for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
