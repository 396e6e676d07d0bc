"""What paired differences of learning curves are for: common effects cancel, and correlated steps add no certainty."""

import numpy as np
import pytest

from fp8core.parity.measure import (
    LearningCurve,
    Pair,
    block_means,
    crossed_interval,
    delay,
    mean_interval,
    steps_to_reach,
)

STEPS, PROMPTS = 20, 64


def flat(*accuracies, steps=None, prompts=100):
    scores = np.array([np.arange(prompts) < round(accuracy * prompts) for accuracy in accuracies], dtype=float)
    return LearningCurve(steps or tuple(range(len(scores))), tuple(map(str, range(prompts))), scores)


@pytest.mark.parametrize("correlated", [False, True])
def test_intervals_hold_what_they_promise_whatever_the_autocorrelation(correlated):
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        gaps = random.standard_normal((8, STEPS))
        if correlated:
            for step in range(1, STEPS):
                gaps[:, step] = 0.95 * gaps[:, step - 1] + np.sqrt(1 - 0.95**2) * gaps[:, step]
        table = gaps.mean(axis=1, keepdims=True) + random.standard_normal((8, PROMPTS))
        found = crossed_interval(table, 0.95)
        covered += found.low <= 0 <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_steps_to_reach_are_between_evaluations():
    assert steps_to_reach(flat(0.5, 0.8, 1.0, 0.7, 1.0, steps=(0, 5, 10, 15, 20)), 0.9) == pytest.approx(7.5)
    assert steps_to_reach(flat(0.95, 0.8, 1.0), 0.9) == 0.0
    assert steps_to_reach(flat(0.5, 0.89), 0.9) is None


def test_who_never_arrives_counts_with_the_last_step():
    early, late, never = flat(0.5, 0.9, 1.0), flat(0.5, 0.6, 0.9), flat(0.5, 0.6, 0.7)
    found = delay([Pair(late, early), Pair(never, early), Pair(never, never)], 0.9, 0.95)
    assert (found.unreached, found.baseline) == (1, 1.0)
    assert found.estimate.value == 1.0
    assert delay([Pair(late, early), Pair(never, never)], 0.9, 0.95).estimate is None


def test_blocks_of_steps_are_as_uncertain_as_their_correlation_makes_them():
    assert block_means([1.0, 3.0, 5.0, 7.0, 9.0]) == [2.0, 7.0]
    assert block_means([2.0]) == [2.0]
    assert block_means([]) == []
    random, covered = np.random.default_rng(4), {"steps": 0, "blocks": 0}
    for _ in range(200):
        noise = random.standard_normal(400)
        for step in range(1, 400):
            noise[step] += 0.7 * noise[step - 1]
        for of, values in (("steps", noise.tolist()), ("blocks", block_means(noise.tolist()))):
            low, high = mean_interval(values, 0.95)
            covered[of] += low <= 0 <= high
    assert covered["steps"] < 140
    assert covered["blocks"] > 170
