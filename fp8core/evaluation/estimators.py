"""Estimators over samples of prompts: pass@k, maj@k, and intervals.

Samples of one prompt are not independent of one another; prompts are. Every interval over more than one sample a prompt
therefore resamples prompts, never samples (a cluster bootstrap).
"""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
# Resamples drawn at once: memory stays small for any number of prompts.
_CHUNK = 256


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k samples is right, estimated without bias from `samples` >= k.

    1 - C(samples - right, k) / C(samples, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1), in exact arithmetic.
    """
    assert 0 <= right <= samples, "right samples are among the samples"
    assert 1 <= k <= samples, "k samples are drawn from them"
    return float(1 - Fraction(math.comb(samples - right, k), math.comb(samples, k)))


def majority_at_k(right: int, others: Sequence[int], silent: int, k: int) -> float:
    """Probability that the most frequent answer of k samples is right, estimated without bias from all of them.

    The mean over all subsets of k samples, in exact arithmetic; a tie is won by each of its answers alike. Where no
    sample of a subset has an answer, nothing wins.

    Args:
        right: samples with the right answer.
        others: samples with each wrong answer.
        silent: samples without an answer, which have no vote.
        k: samples in a vote.
    """
    samples = right + sum(others) + silent
    assert 1 <= k <= samples, "k samples are drawn from them"
    won = Fraction(0)
    for votes in range(1, min(right, k) + 1):
        ways = math.comb(right, votes)
        for (drawn, tied), count in _opposing(others, votes, k - votes).items():
            won += Fraction(ways * count * math.comb(silent, k - votes - drawn), tied + 1)
    return float(won / math.comb(samples, k))


def _opposing(others: Sequence[int], votes: int, most: int) -> Counter[tuple[int, int]]:
    """Ways in which wrong answers get at most `votes` each: (samples drawn, answers with exactly `votes`) -> ways."""

    def extended(ways: Counter[tuple[int, int]], size: int) -> Counter[tuple[int, int]]:
        found: Counter[tuple[int, int]] = Counter()
        for (drawn, tied), count in ways.items():
            for taken in range(min(size, votes, most - drawn) + 1):
                found[drawn + taken, tied + (taken == votes)] += count * math.comb(size, taken)
        return found

    return reduce(extended, others, Counter({(0, 0): 1}))


def wilson_interval(right: int, count: int, confidence: float) -> tuple[float, float]:
    """Interval of a proportion from independent trials (Wilson 1927): honest near 0 and 1, too."""
    assert 0 <= right <= count, "right trials are among the trials"
    assert count > 0, "a proportion needs a trial"
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, weight = right / count, z * z / count
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    # Rounding must not push the ends past what they are for none and for all.
    return (0.0 if right == 0 else centre - half), (1.0 if right == count else centre + half)


def bootstrap_interval(values: Sequence[float], confidence: float, seed: int) -> tuple[float, float]:
    """Percentile interval of the mean of one value a prompt, resampled over prompts; the same for the same seed."""
    means = _resampled_means(np.asarray(values, np.float64), np.random.default_rng(seed))
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def _resampled_means(values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    assert len(values) > 0, "a mean needs a prompt"
    rows = [min(_CHUNK, RESAMPLES - start) for start in range(0, RESAMPLES, _CHUNK)]
    return np.concatenate([values[rng.integers(len(values), size=(n, len(values)))].mean(axis=1) for n in rows])
