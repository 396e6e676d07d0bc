"""Estimators against brute force over all subsets, and intervals against what they promise."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8core.evaluation.estimators import bootstrap_interval, majority_at_k, pass_at_k, wilson_interval


@st.composite
def drawn(draw: st.DrawFn) -> tuple[int, list[int], int, int]:
    """Right samples, samples of each wrong answer, silent ones, and k: at most 9 samples."""
    right, silent = draw(st.integers(0, 4)), draw(st.integers(0, 2))
    others = draw(st.lists(st.integers(1, 3), max_size=3))
    samples = right + sum(others) + silent
    if samples == 0:
        return 1, [], 0, 1
    return right, others, silent, draw(st.integers(1, samples))


def ballots(right: int, others: list[int], silent: int) -> list[str | None]:
    wrong = [f"wrong {i}" for i, size in enumerate(others) for _ in range(size)]
    return [*["right"] * right, *wrong, *[None] * silent]


@given(drawn())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case: tuple[int, list[int], int, int]) -> None:
    right, others, silent, k = case
    subsets = list(combinations(ballots(right, others, silent), k))
    expected = Fraction(sum("right" in subset for subset in subsets), len(subsets))
    assert pass_at_k(right + sum(others) + silent, right, k) == float(expected)


@given(drawn())
def test_majority_at_k_is_the_share_of_subsets_it_wins(case: tuple[int, list[int], int, int]) -> None:
    right, others, silent, k = case
    subsets = list(combinations(ballots(right, others, silent), k))
    won = Fraction(0)
    for subset in subsets:
        votes = Counter(ballot for ballot in subset if ballot is not None)
        most = [answer for answer, count in votes.items() if count == max(votes.values())]
        won += Fraction("right" in most, max(1, len(most)))
    assert majority_at_k(right, others, silent, k) == float(won / len(subsets))


@given(st.integers(1, 40), st.data())
def test_pass_at_k_grows_with_k_up_to_whether_any_is_right(samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, samples))
    values = [pass_at_k(samples, right, k) for k in range(1, samples + 1)]
    assert values[0] == right / samples
    assert values[-1] == (right > 0)
    assert all(low <= high for low, high in pairwise(values))


def test_one_vote_is_a_majority_of_one() -> None:
    assert majority_at_k(3, [2, 4], 1, 1) == pass_at_k(10, 3, 1)


def test_many_samples_stay_exact_and_fast() -> None:
    assert majority_at_k(40, [8] * 10, 8, 128) == 1.0
    assert 0 < majority_at_k(20, [4] * 10, 4, 32) < 1
    assert pass_at_k(10_000, 1, 1) == 1e-4


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe 1998 (Statistics in Medicine 17), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval(right: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(right, count, 0.95) == pytest.approx((low, high), abs=6e-5)
    assert wilson_interval(count - right, count, 0.95) == pytest.approx((1 - high, 1 - low), abs=6e-5)


@given(st.integers(1, 500), st.data(), st.floats(0.5, 0.999))
def test_wilson_holds_the_share(count: int, data: st.DataObject, confidence: float) -> None:
    right = data.draw(st.integers(0, count))
    low, high = wilson_interval(right, count, confidence)
    assert 0 <= low <= right / count <= high <= 1


def test_the_bootstrap_is_seeded_and_holds_the_mean() -> None:
    values = list(np.random.default_rng(1).random(50))
    low, high = bootstrap_interval(values, 0.95, seed=0)
    assert low < np.mean(values) < high
    assert (low, high) == bootstrap_interval(values, 0.95, seed=0) != bootstrap_interval(values, 0.95, seed=1)
    narrow = bootstrap_interval(values, 0.5, seed=0)
    assert low < narrow[0] < narrow[1] < high


def test_the_bootstrap_has_the_width_of_the_normal_approximation() -> None:
    values = np.random.default_rng(2).random(400)
    low, high = bootstrap_interval(list(values), 0.95, seed=0)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)


def test_the_bootstrap_covers_as_often_as_it_says() -> None:
    # Half of the prompts are solved always, half never: resampling samples instead of prompts would cover 30 %.
    rng, covered = np.random.default_rng(3), 0
    for seed in range(60):
        low, high = bootstrap_interval(list(rng.integers(0, 2, 40).astype(float)), 0.9, seed)
        covered += low <= 0.5 <= high
    assert covered >= 45
