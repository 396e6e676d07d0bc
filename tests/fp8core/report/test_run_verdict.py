"""The answer of a training: learned or not, equal policies or by how much, and its speed."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fp8core.report.chart import short
from fp8core.report.head import head
from fp8core.report.run_data import read_run
from fp8core.report.run_verdict import answer, token_mean


def history(rewards, heldout=(), error=1.0, differing=0.0):
    rows = [
        {
            "step": step,
            "reward/mean": reward,
            "alignment/token_mult_prob_error": error,
            "alignment/tokens_differing": differing,
            "alignment/tokens": 100.0,
        }
        for step, reward in enumerate(rewards, 1)
    ]
    for row, accuracy in zip(rows, heldout, strict=False):
        row["reward/heldout_accuracy"] = accuracy
    return rows


RISING = [0.45 + 0.25 * math.tanh((step - 12) / 6) + 0.02 * (-1) ** step for step in range(24)]


@pytest.mark.parametrize(
    ("rewards", "heldout", "learning"),
    [
        (RISING, (0.2, 0.5), "learned"),
        (RISING, (), "learned"),
        (RISING, (0.5, 0.2), "learned its prompts alone"),
        (RISING[::-1], (0.5, 0.2), "got worse"),
        ([0.4, 0.6] * 10, (0.5, 0.6), "not learned"),
        ([0.5] * 20, (), "not learned"),
        ([0.5] * 19, (), "too short to tell"),
        (RISING[:9], (), "too short to tell"),
        (RISING[:10], (), "too short to tell"),
        ([0.5], (), "too short to tell"),
        ([float("nan")] * 10, (), "too short to tell"),
        ([], (), "too short to tell"),
    ],
)
def test_a_reward_has_to_change_by_more_than_chance(rewards, heldout, learning) -> None:
    assert answer(history(rewards, heldout), short, prompts=256).learning == learning


@pytest.mark.parametrize(("steps", "correlation"), [(10, 0.8), (20, 0.6), (40, 0.8), (80, 0.0), (80, 0.8), (80, 0.9)])
def test_correlated_rewards_without_a_trend_are_no_learning(steps, correlation) -> None:
    """Neighbouring steps share their prompts' difficulty and most of their policy: noise goes up and down slowly."""
    random, found = np.random.default_rng(5), Counter()
    for _ in range(300):
        noise = random.standard_normal(steps)
        noise[0] /= math.sqrt(1 - correlation**2)
        for step in range(1, steps):
            noise[step] += correlation * noise[step - 1]
        found[answer(history((0.5 + 0.05 * noise).tolist()), short).learning] += 1
    assert found["learned"] + found["got worse"] <= 0.05 * 300, found


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_a_rise_that_ends_early_is_seen_in_noise(correlation, sign) -> None:
    """As rewards of the tiny run: most of the rise comes in the first third of 80 steps."""
    random, learning = np.random.default_rng(6), "learned" if sign > 0 else "got worse"
    for _ in range(50):
        noise = 0.04 * random.standard_normal(80)
        for step in range(1, 80):
            noise[step] += correlation * noise[step - 1]
        rewards = 0.6 + sign * 0.4 * (1 - np.exp(-np.arange(80) / 12)) + noise
        assert answer(history(rewards.tolist()), short).learning == learning


@pytest.mark.parametrize(
    ("heldout", "prompts", "left", "learning"),
    [
        ((0.457, 0.625), 256, 0, "learned"),
        ((0.457, 0.625), 256, 74, "learned"),
        ((0.457, 0.625), 32, 0, "not learned"),
        ((0.457, 0.625), None, 0, "not learned"),
        ((0.625, 0.457), 256, 0, "not learned"),
        ((0.457, 0.46), 256, 74, "too short to tell"),
        ((3.4, 3.5), 256, 0, "not learned"),
    ],
)
def test_held_out_accuracy_that_rose_is_learning_whatever_the_reward_did(heldout, prompts, left, learning) -> None:
    found = answer(history([0.63, 0.61] * 10, heldout), short, prompts=prompts, left=left)
    assert found.learning == learning
    assert f"held-out accuracy {heldout[0]} to {heldout[1]}" in found.words


def test_a_run_that_goes_on_is_too_short_to_tell(whole_run) -> None:
    run = read_run(whole_run.folder, "whole")
    stopped = replace(run, history=history([0.63, 0.61] * 10))
    assert head(stopped)[-2].startswith("Not learned")
    config = run.view.config.model_copy(update={"steps": 80})
    assert head(replace(stopped, view=replace(run.view, config=config)))[-2].startswith("Too short")


@pytest.mark.parametrize(
    ("error", "differing", "agreement", "shown"),
    [
        (1.0, 0.0, "equal", "2,400"),
        (1.0 + 1e-9, 1.0, "different", "1+1e-09"),
        (1.25, 50.0, "different", "1.250000"),
        # Errors can cancel; tokens that differ do not.
        (1.0, 3.0, "different", "1 exactly"),
    ],
)
def test_equal_is_said_of_equal_bits_alone(error, differing, agreement, shown) -> None:
    found = answer(history(RISING, (), error, differing), short)
    assert found.agreement == agreement
    assert shown in found.words


def test_a_share_that_was_compared_is_called_a_share() -> None:
    """A run whose log-probs are the rollout's compares a sixteenth of its completions."""
    rows = [row | {"rollout/tokens": 1600.0} for row in history(RISING)]
    assert "bit for bit on the 2,400 tokens that were compared, 6.2 % of all" in answer(rows, short).words
    rows[0] |= {"alignment/tokens_differing": 24.0}
    assert "differ on 1 % of the 2,400 tokens that were compared, 6.2 % of all" in answer(rows, short).words
    assert "on 1 % of 2,400 tokens" in answer([row | {"rollout/tokens": 100.0} for row in rows], short).words


def test_the_mean_error_is_that_of_all_tokens() -> None:
    rows = [row | {"alignment/tokens": count} for row, count in zip(history([0.5] * 2), (10.0, 990.0), strict=True)]
    rows[0] |= {"alignment/token_mult_prob_error": 2.0, "alignment/tokens_differing": 5.0}
    assert "error a token 1.010000 in the mean, 2.000000 at most" in answer(rows, short).words
    older = [{name: value for name, value in row.items() if name != "alignment/tokens"} for row in rows]
    assert token_mean(older, "alignment/token_mult_prob_error") == 1.5


def test_a_run_without_measurements_has_an_answer() -> None:
    assert answer([{"step": 1}], short).agreement == "not measured"


def test_the_sentence_of_a_run_has_its_speed(whole_run) -> None:
    run = read_run(whole_run.folder, "whole")
    # Engines compile in the first step.
    seconds = {"rollout": {1: 1e9, 2: run.history[2]["rollout/tokens"]}}
    slow = replace(run, busy=dict.fromkeys(run.busy, 4321.0), seconds=seconds)
    assert "4,321 s of tasks a step" in head(slow)[-1]
    assert " 1 tokens a second" in head(slow)[-1]
    assert head(replace(run, history=[], busy={}, seconds={}))[-1].endswith(".")
