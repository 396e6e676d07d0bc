import pytest

from fp8core.evaluation.estimators import bootstrap_interval, wilson_interval
from fp8core.evaluation.measure import Counting, Measurement, measure, paired_differences, score_prompt
from fp8core.rewards.verdict import RIGHT, Verdict, crashed, timed_out, unparsed, wrong

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


def test_more_samples_are_resampled_by_prompt() -> None:
    several = measured([RIGHT, RIGHT, RIGHT], [RIGHT, wrong("a"), wrong("a")], [wrong("a"), wrong("b"), wrong("c")])
    values = [1.0, 1 / 3, 0.0]
    estimate = several.estimates["pass@1"]
    assert estimate.value == pytest.approx(4 / 9)
    assert (estimate.low, estimate.high) == pytest.approx(bootstrap_interval(values, 0.9, 7))
    assert set(several.estimates) == {"pass@1", "pass@3", "maj@3"}


def test_paired_differences_cancel_what_prompts_share() -> None:
    hard, easy = [wrong("a")] * 3, [RIGHT] * 3
    base = measured(hard, easy, hard, easy)
    assert {(d.value, d.low, d.high) for d in paired_differences(base, base, COUNTING).values()} == {(0.0, 0.0, 0.0)}
    worse = measured(hard, [RIGHT, RIGHT, wrong("a")], hard, easy)
    difference = paired_differences(base, worse, COUNTING)["pass@1"]
    assert difference.value == pytest.approx(-1 / 12)
    assert difference.low < difference.value < difference.high <= 0
    width = base.estimates["pass@1"].high - base.estimates["pass@1"].low
    assert difference.high - difference.low < width
