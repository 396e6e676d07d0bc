"""Estimators against brute force over all subsets, and intervals against what they promise."""

import json
from collections import Counter
from fractions import Fraction
from itertools import combinations, pairwise
from math import comb
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.errors import UserError
from fp8core.evaluation.measure import (
    Counting,
    EvaluationResult,
    Measurement,
    all_problems,
    bootstrap_interval,
    contract_in,
    difference_estimate,
    heldout_problems,
    majority_at_k,
    measure,
    paired_differences,
    paired_interval,
    pass_at_k,
    score_estimate,
    score_prompt,
    wilson_interval,
)
from fp8core.rewards.scorer import RIGHT, Verdict, crashed, timed_out, unparsed, wrong


def test_a_result_has_the_name_of_its_folder_however_that_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for target in (".", str(tmp_path), f"../{tmp_path.name}/", tmp_path.name):
        assert EvaluationResult.model_construct(target=target).name == tmp_path.name


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


def slow_majority(right: int, others: list[int], silent: int, k: int) -> float:
    """By dynamic programming over answers, one sample count after another, in dictionaries."""
    samples, won = right + sum(others) + silent, Fraction(0)
    for votes in range(1, min(right, k) + 1):
        ways = {(0, 0): 1}
        for size in others:
            extended: Counter[tuple[int, int]] = Counter()
            for (drawn, tied), count in ways.items():
                for taken in range(min(size, votes, k - votes - drawn) + 1):
                    extended[drawn + taken, tied + (taken == votes)] += count * comb(size, taken)
            ways = extended
        for (drawn, tied), count in ways.items():
            won += Fraction(comb(right, votes) * count * comb(silent, k - votes - drawn), tied + 1)
    return float(won / comb(samples, k))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 20), st.lists(st.integers(1, 12), max_size=8), st.integers(0, 12), st.data())
def test_majority_at_k_of_more_samples_is_that_of_a_slow_count(
    right: int, others: list[int], silent: int, data: st.DataObject
) -> None:
    samples = right + sum(others) + silent
    k = data.draw(st.integers(1, max(samples, 1)))
    if samples:
        assert majority_at_k(right, others, silent, k) == slow_majority(right, others, silent, k)


@pytest.mark.parametrize("others", [[2] * 90, [64, 32, 16, 8, 8, 8, 4, 4, 4, *[2] * 10, *[1] * 12], [*range(1, 19), 9]])
def test_majority_at_k_of_256_samples_takes_no_time(others: list[int]) -> None:
    # It took two seconds each.
    began = process_time()
    for k in (64, 128, 250):
        assert 0 <= majority_at_k(60, others, 256 - 60 - sum(others), k) <= 1
    assert process_time() - began < 1.5


@given(st.integers(1, 40), st.data())
def test_pass_at_k_grows_with_k_up_to_whether_any_is_right(samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, samples))
    values = [pass_at_k(samples, right, k) for k in range(1, samples + 1)]
    assert values[0] == right / samples
    assert values[-1] == (right > 0)
    assert all(low <= high for low, high in pairwise(values))


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


@given(st.integers(1, 500), st.data())
def test_the_interval_of_pairs_holds_the_difference_and_has_no_side(count: int, data: st.DataObject) -> None:
    better = data.draw(st.integers(0, count))
    worse = data.draw(st.integers(0, count - better))
    low, high = paired_interval(better, worse, count, 0.95)
    assert -1 <= low <= (better - worse) / count <= high <= 1
    assert paired_interval(worse, better, count, 0.95) == pytest.approx((-high, -low), abs=1e-12)
    # Equal answers on few prompts are no proof that both sides are equal.
    assert low < 0 < high or better != worse


def test_the_bootstrap_is_seeded_and_holds_the_mean() -> None:
    values = list(np.random.default_rng(1).random(50))
    low, high = bootstrap_interval(values, 0.95, seed=0)
    assert low < np.mean(values) < high
    assert (low, high) == bootstrap_interval(values, 0.95, seed=0) != bootstrap_interval(values, 0.95, seed=1)
    narrow = bootstrap_interval(values, 0.5, seed=0)
    assert low < narrow[0] < narrow[1] < high


def test_whole_scores_have_a_formula_and_others_two_prompts_more() -> None:
    for scores, right in (([1.0] * 8, 8), ([0.0] * 8, 0), ([0.0, 1.0] * 4, 4)):
        found = score_estimate(scores, 0.95, 0)
        assert (found.low, found.high) == wilson_interval(right, len(scores), 0.95)
    for differences, better, worse in (([0.0] * 20, 0, 0), ([1.0, 0.0, 0.0, -1.0], 1, 1), ([0.0, 1.0] * 4, 4, 0)):
        found = difference_estimate(differences, 0.95, 0)
        assert (found.low, found.high) == paired_interval(better, worse, len(differences), 0.95)
    mixed = [0.5, 1.0, 0.25, 0.0]
    for found, end in ((score_estimate(mixed, 0.95, 3), 0.0), (difference_estimate(mixed, 0.95, 3), -1.0)):
        assert (found.low, found.high) == bootstrap_interval([*mixed, end, 1.0], 0.95, 3)
    # Equal values are no proof that the next one is equal; scores of a user's own have no ends.
    assert score_estimate([0.75] * 8, 0.95, 0).low < 0.7 < 0.8 < score_estimate([0.75] * 8, 0.95, 0).high
    assert score_estimate([2.0, 2.0], 0.95, 0).low == 2.0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sampled_from([0.5, 0.9, 0.95]))
@settings(deadline=None, max_examples=40)
def test_bounds_grow_with_k_as_the_estimates_do(rights: list[int], confidence: float) -> None:
    """Intervals of several kinds gave pass@2 a lower bound below that of pass@1."""
    scores = [score_prompt(f"p{i}", [RIGHT] * n + [wrong("a")] * (4 - n), (1, 2, 4)) for i, n in enumerate(rights)]
    found = measure(scores, [4] * len(rights), Counting((1, 2, 4), confidence, 7)).estimates
    for less, more in (("pass@1", "pass@2"), ("pass@2", "pass@4"), ("maj@4", "pass@4")):
        assert found[less].low <= found[more].low
        assert found[less].high <= found[more].high
    assert all(each.low <= each.value <= each.high for each in found.values())


def test_shares_near_one_are_covered_as_often_as_the_interval_says() -> None:
    """Of 32 prompts solved in 97 % of samples, many have equal shares: a plain bootstrap covered 19 % of pass@2."""
    random, covered, truth = np.random.default_rng(4), 0, 1 - 0.03**2
    for _ in range(60):
        rights = random.binomial(4, 0.97, 32)
        scores = [score_prompt(str(i), [RIGHT] * n + [wrong("a")] * (4 - n), (1, 2)) for i, n in enumerate(rights)]
        found = measure(scores, [4] * 32, Counting((1, 2), 0.95, 7)).estimates["pass@2"]
        covered += found.low <= truth <= found.high
    assert covered >= 54


COUNTING = Counting((1, 3), 0.9, 7)


def measured(*prompts: list[Verdict], k: tuple[int, ...] = (1, 3)) -> Measurement:
    scores = [score_prompt(f"p{i}", verdicts, k) for i, verdicts in enumerate(prompts)]
    lengths = [4] * sum(len(verdicts) for verdicts in prompts)
    return measure(scores, lengths, COUNTING)


def test_equal_wrong_answers_vote_together_and_silence_has_no_vote() -> None:
    together = score_prompt("p", [RIGHT, wrong("answer 17"), wrong("answer 17")], (3,))
    apart = score_prompt("p", [RIGHT, wrong("answer 17"), wrong("answer 19")], (3,))
    silent = score_prompt("p", [RIGHT, unparsed("no ####"), timed_out("late")], (3,))
    assert [score.measured["maj@3"] for score in (together, apart, silent)] == [0.0, pytest.approx(1 / 3), 1.0]
    assert together.measured["pass@3"] == 1.0
    assert silent.outcomes == {"right": 1, "unparsed": 1, "timeout": 1}


def test_a_reward_below_one_is_not_right_whatever_it_pays() -> None:
    assert score_prompt("p", [Verdict(0.5, "wrong", "half"), RIGHT], (1,)).measured == {"pass@1": 0.5}


def test_one_sample_a_prompt_gets_wilsons_interval() -> None:
    one = measured([RIGHT], [RIGHT], [wrong("answer 3")], [crashed("oops")], k=(1,))
    assert set(one.estimates) == {"pass@1"}
    estimate = one.estimates["pass@1"]
    assert (estimate.value, estimate.low, estimate.high) == (0.5, *wilson_interval(2, 4, 0.9))
    assert one.outcomes == {"right": 2, "wrong": 1, "unparsed": 0, "timeout": 0, "crashed": 1}
    assert one.length_mean == 4


def test_prompts_that_are_right_in_all_samples_leave_room_for_one_that_is_not() -> None:
    estimate = measured(*[[RIGHT] * 3] * 8).estimates["pass@1"]
    assert (estimate.value, estimate.low, estimate.high) == (1.0, *wilson_interval(8, 8, 0.9))


def test_more_samples_are_resampled_by_prompt() -> None:
    several = measured([RIGHT, RIGHT, RIGHT], [RIGHT, wrong("a"), wrong("a")], [wrong("a"), wrong("b"), wrong("c")])
    values = [1.0, 1 / 3, 0.0]
    estimate = several.estimates["pass@1"]
    assert estimate.value == pytest.approx(4 / 9)
    assert (estimate.low, estimate.high) == pytest.approx(bootstrap_interval([*values, 0.0, 1.0], 0.9, 7))
    assert set(several.estimates) == {"pass@1", "pass@3", "maj@3"}


def test_paired_differences_cancel_what_prompts_share() -> None:
    hard, easy = [wrong("a")] * 3, [RIGHT] * 3
    base = measured(*[hard, easy] * 8)
    interval = paired_interval(0, 0, 16, 0.9)
    assert {(d.value, d.low, d.high) for d in paired_differences(base, base, COUNTING).values()} == {(0.0, *interval)}
    worse = measured(hard, [RIGHT, RIGHT, wrong("a")], *[hard, easy] * 7)
    difference = paired_differences(base, worse, COUNTING)["pass@1"]
    assert difference.value == pytest.approx(-1 / 48)
    assert difference.low < difference.value < difference.high
    width = base.estimates["pass@1"].high - base.estimates["pass@1"].low
    assert difference.high - difference.low < width


@pytest.fixture
def config(tmp_path):
    rows = [{"question": f"What is {n % 20} and 1?", "answer": f"#### {n + 1}"} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config("gsm8k", {"model": "any", "data.source": str(tmp_path / "rows.jsonl"), "evaluation.prompts": 1})


def test_every_question_is_asked_once_in_an_order_that_the_file_does_not_decide(config):
    problems = all_problems(config, None)
    assert len(problems) == 20
    assert [row.prompt_id for row in problems] == sorted(row.prompt_id for row in problems)
    assert {row.question: row.reference for row in problems}["What is 3 and 1?"] == "#### 4"
    assert all_problems(config, 5) == problems[:5]
    with pytest.raises(UserError, match=r"rows\.jsonl: prompts=21, but there are only 20 different questions"):
        all_problems(config, 21)


def test_heldout_problems_are_those_of_the_training(config):
    tiny = load_config("tiny", {"evaluation.prompts": 3})
    assert len(heldout_problems(tiny)) == 3
    with pytest.raises(UserError, match="the chain task has no rows"):
        all_problems(tiny, None)


def test_a_precision_changes_the_rollout_side_alone():
    contract = PrecisionContract(rollout=SidePrecision(kv_cache="bf16", head="bf16"), bf16_last_layers=1)
    assert contract_in("configured", contract) == contract
    fp8, bf16 = (contract_in(name, contract) for name in ("fp8", "bf16"))
    assert (fp8.rollout.linear, fp8.rollout.kv_cache, fp8.rollout.head) == ("fp8_block", "fp8", "bf16")
    assert (bf16.rollout.linear, bf16.rollout.kv_cache, bf16.rollout.head) == ("bf16", "bf16", "bf16")
    assert (fp8.bf16_last_layers, fp8.training) == (1, contract.training)
