"""Estimators against brute force over all subsets, and intervals against what they promise."""

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.evaluation.measure import Measurement, measure, paired_differences, pass_at_k, score_estimate, score_prompt
from fp8core.rewards.scorer import RIGHT, Verdict, unparsed_answer, wrong


@pytest.mark.parametrize(("samples", "right"), [(1, 0), (1, 1), (5, 0), (6, 2), (7, 7)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples: int, right: int) -> None:
    for k in range(1, samples + 1):
        subsets = list(combinations([1] * right + [0] * (samples - right), k))
        assert pass_at_k(samples, right, k) == float(Fraction(sum(map(max, subsets)), len(subsets)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
@settings(deadline=None, max_examples=40)
def test_bounds_grow_with_k_as_the_estimates_do(rights: list[int]) -> None:
    """Intervals of several kinds gave pass@2 a lower bound below that of pass@1."""
    scores = [score_prompt(f"p{i}", [RIGHT] * n + [wrong("a")] * (4 - n), (1, 2, 4)) for i, n in enumerate(rights)]
    found = measure(scores, [4] * len(rights), 7).estimates
    for less, more in (("pass@1", "pass@2"), ("pass@2", "pass@4"), ("majority", "pass@4")):
        assert found[less].low <= found[more].low
        assert found[less].high <= found[more].high
    assert all(each.low <= each.value <= each.high for each in found.values())


def test_intervals_have_room_where_values_are_equal_and_are_seeded() -> None:
    """Whole scores have Wilson's interval: Newcombe 1998 (Statistics in Medicine 17), table I, method 3."""
    found = score_estimate([1.0] * 15 + [0.0] * 133, 0)
    assert (found.low, found.high) == pytest.approx((0.0624, 0.1605), abs=6e-5)
    right = score_estimate([1.0] * 8, 0)
    assert right.low < 0.8 < right.high == 1.0
    equal = score_estimate([0.75] * 8, 0)
    assert equal.low < 0.7 < 0.8 < equal.high
    assert score_estimate([2.0, 2.0], 0).low == 2.0
    mixed = [0.5, 1.0, 0.25, 0.0]
    assert score_estimate(mixed, 3) == score_estimate(mixed, 3) != score_estimate(mixed, 4)


def measured(*prompts: list[Verdict], k: tuple[int, ...] = (1, 3)) -> Measurement:
    scores = [score_prompt(f"p{i}", verdicts, k) for i, verdicts in enumerate(prompts)]
    lengths = [4] * sum(len(verdicts) for verdicts in prompts)
    return measure(scores, lengths, 7)


def test_equal_wrong_answers_vote_together_and_silence_has_no_vote() -> None:
    together = score_prompt("p", [RIGHT, wrong("answer 17"), wrong("answer 17")], (3,))
    apart = score_prompt("p", [RIGHT, wrong("answer 17"), wrong("answer 19")], (3,))
    silent = score_prompt("p", [RIGHT, unparsed_answer("no ####"), Verdict(0.0, "timeout", "late")], (3,))
    assert [score.measured["majority"] for score in (together, apart, silent)] == [0.0, pytest.approx(1 / 3), 1.0]
    assert together.measured["pass@3"] == 1.0
    assert silent.outcomes == {"right": 1, "unparsed": 1, "timeout": 1}


def test_paired_differences_cancel_what_prompts_share() -> None:
    hard, easy = [wrong("a")] * 3, [RIGHT] * 3
    base = measured(*[hard, easy] * 8)
    # Equal answers on few prompts are no proof that both sides are equal.
    assert all(d.low < d.value == 0 < d.high for d in paired_differences(base, base, 7).values())
    worse = measured(hard, [RIGHT, RIGHT, wrong("a")], *[hard, easy] * 7)
    difference = paired_differences(base, worse, 7)["pass@1"]
    assert difference.value == pytest.approx(-1 / 48)
    assert difference.low < difference.value < difference.high
    width = base.estimates["pass@1"].high - base.estimates["pass@1"].low
    assert difference.high - difference.low < width
