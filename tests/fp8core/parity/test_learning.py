"""What paired differences of learning curves are for: common effects cancel, and correlated steps add no certainty."""

import numpy as np
import pytest

from fp8core.parity.measure import (
    LearningCurve,
    Pair,
    block_means,
    crossed_interval,
    curve_difference,
    delay,
    end_difference,
    mean_interval,
    steps_to_reach,
)


def test_an_interval_by_hand():
    # mean 2, deviation 1, so 4.303 / sqrt(3) to each side
    low, high = mean_interval([1.0, 2.0, 3.0], 0.95)
    assert (low, high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    assert mean_interval([0.5, 0.5], 0.95) == pytest.approx((0.5, 0.5))


STEPS, PROMPTS = 20, 64


def drawn(random, accuracy):
    """A curve with independent answers of these accuracies [step] or [step, prompt]."""
    scores = random.random((STEPS, PROMPTS)) < np.broadcast_to(np.transpose(accuracy), (PROMPTS, STEPS)).T
    return LearningCurve(tuple(range(STEPS)), tuple(map(str, range(PROMPTS))), scores.astype(float))


def flat(*accuracies, steps=None, prompts=100):
    scores = np.array([np.arange(prompts) < round(accuracy * prompts) for accuracy in accuracies], dtype=float)
    return LearningCurve(steps or tuple(range(len(scores))), tuple(map(str, range(prompts))), scores)


@pytest.fixture
def pairs():
    random = np.random.default_rng(3)
    return [Pair(drawn(random, np.full(STEPS, 0.6)), drawn(random, np.full(STEPS, 0.7))) for _ in range(6)]


def width(estimate):
    return estimate.high - estimate.low


def test_swapped_variants_mirror(pairs):
    turned = [Pair(pair.baseline, pair.variant) for pair in pairs]
    for of in (lambda p: curve_difference(p, 0.95), lambda p: end_difference(p, 5, 0.95)):
        there, back = of(pairs), of(turned)
        assert (back.mean, back.low, back.high) == pytest.approx((-there.mean, -there.high, -there.low))


def test_what_seeds_share_cancels():
    """Seeds of 20 to 90 % accuracy with a loss of 10 points: unpaired they are lost in their spread."""
    levels = (0.2, 0.5, 0.7, 0.9)
    pairs = [Pair(flat(*[level - 0.1] * 5), flat(*[level] * 5)) for level in levels]
    found = curve_difference(pairs, 0.95)
    assert (found.mean, found.low, found.high) == pytest.approx((-0.1, -0.1, -0.1))
    low, high = mean_interval([level - 0.1 for level in levels], 0.95)
    assert high - low > 0.5


def test_evaluations_that_repeat_one_another_add_no_certainty():
    """Each answer stays for ten evaluations: the interval is that of the two evaluations there really are."""
    random = np.random.default_rng(0)
    few = [Pair(*(flat(*random.uniform(0.6, 0.8, 3)) for _ in range(2))) for _ in range(8)]

    def repeated(curve):
        scores = np.vstack([curve.scores[:1], np.repeat(curve.scores[1:], 10, axis=0)])
        return LearningCurve(tuple(range(len(scores))), curve.prompts, scores)

    many = [Pair(repeated(pair.variant), repeated(pair.baseline)) for pair in few]
    once, often = curve_difference(few, 0.95), curve_difference(many, 0.95)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


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


def test_prompts_are_a_sample_too():
    """A variant that is wrong on some prompts for every seed: other prompts could have told another difference."""
    random = np.random.default_rng(2)
    of_prompts = 0.3 * random.standard_normal((1, PROMPTS))
    table = of_prompts + 0.01 * random.standard_normal((6, PROMPTS))
    found = crossed_interval(table, 0.95)
    low, high = mean_interval(list(table.mean(axis=1)), 0.95)
    assert width(found) > 10 * (high - low)
    assert width(crossed_interval(table - of_prompts, 0.95)) < 2 * (high - low)


def test_steps_to_reach_are_between_evaluations():
    assert steps_to_reach(flat(0.5, 0.8, 1.0, 0.7, 1.0, steps=(0, 5, 10, 15, 20)), 0.9) == pytest.approx(7.5)
    assert steps_to_reach(flat(0.95, 0.8, 1.0), 0.9) == 0.0
    assert steps_to_reach(flat(0.5, 0.89), 0.9) is None


def test_who_never_arrives_counts_with_the_last_step():
    early, late, never = flat(0.5, 0.9, 1.0), flat(0.5, 0.6, 0.9), flat(0.5, 0.6, 0.7)
    found = delay([Pair(late, early), Pair(never, early), Pair(never, never)], 0.9, 0.95)
    assert (found.unreached, found.baseline) == (1, 1.0)
    assert found.estimate.mean == 1.0
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
