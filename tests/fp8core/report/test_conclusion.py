"""The answer of a training: learned or not, equal policies or by how much, its speed, and the one action."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fp8core.report.conclusion import agreement, answer, conclude
from fp8core.report.run_data import RunData, read_run

RISING = [0.45 + 0.25 * math.tanh((step - 12) / 6) + 0.02 * (-1) ** step for step in range(24)]
LEVEL = [0.63, 0.61] * 12


def history(rewards, heldout=(), error=1.0, differing=0.0, **more):
    """Rewards of steps from 1 on, with held-out accuracies before the first and after the last one."""
    rows = [
        {
            "step": step,
            "reward/mean": reward,
            "alignment/token_mult_prob_error": error,
            "alignment/tokens_differing": differing,
            "alignment/tokens": 100.0,
            **more,
        }
        for step, reward in enumerate(rewards, 1)
    ]
    if heldout:
        rows = [{"step": 0, "reward/heldout_accuracy": heldout[0]}, *rows]
        rows[-1]["reward/heldout_accuracy"] = heldout[1]
    return rows


@pytest.fixture
def run(whole_run) -> RunData:
    return read_run(whole_run.folder, "whole")


@pytest.mark.parametrize(
    ("rewards", "heldout", "prompts", "left", "learning"),
    [
        (RISING, (0.2, 0.5), 256, 0, "learned"),
        (RISING, (), 256, 0, "learned"),
        (RISING, (0.5, 0.2), 256, 0, "learned its prompts alone"),
        (RISING[::-1], (0.5, 0.2), 256, 0, "got worse"),
        ([0.4, 0.6] * 10, (0.5, 0.6), 256, 0, "not learned"),
        ([0.5] * 19, (), 256, 0, "too short to tell"),
        (RISING[:9], (), 256, 0, "too short to tell"),
        ([math.nan] * 10, (), 256, 0, "too short to tell"),
        ([], (), 256, 0, "too short to tell"),
        # Held-out accuracy that rose is learning, whatever the reward did.
        (LEVEL, (0.457, 0.625), 256, 0, "learned"),
        (LEVEL, (0.457, 0.625), 256, 74, "learned"),
        (LEVEL, (0.457, 0.625), 32, 0, "not learned"),
        (LEVEL, (0.457, 0.625), None, 0, "not learned"),
        (LEVEL, (0.457, 0.46), 256, 74, "too short to tell"),
        (LEVEL, (3.4, 3.5), 256, 0, "not learned"),
    ],
)
def test_a_change_has_to_be_larger_than_chance(rewards, heldout, prompts, left, learning) -> None:
    assert answer(history(rewards, heldout), prompts, left).learning == learning


@pytest.mark.parametrize(("steps", "correlation"), [(10, 0.8), (20, 0.6), (80, 0.0), (80, 0.9)])
def test_correlated_rewards_without_a_trend_are_no_learning(steps, correlation) -> None:
    """Neighbouring steps share their prompts' difficulty and most of their policy: noise goes up and down slowly."""
    random, outcomes = np.random.default_rng(5), Counter()
    for _ in range(300):
        noise = random.standard_normal(steps)
        noise[0] /= math.sqrt(1 - correlation**2)
        for step in range(1, steps):
            noise[step] += correlation * noise[step - 1]
        outcomes[answer(history((0.5 + 0.05 * noise).tolist())).learning] += 1
    assert outcomes["learned"] + outcomes["got worse"] <= 0.05 * 300, outcomes


@pytest.mark.parametrize(
    ("error", "differing", "words"),
    [
        (1.0, 0.0, "agree bit for bit on all 2,400 tokens"),
        (1.0 + 1e-9, 1.0, "1+1e-09"),
        (1.25, 50.0, "differ on 50 % of 2,400 tokens, error a token 1.250000"),
        # Errors can cancel; tokens that differ do not.
        (1.0, 3.0, "differ on 3 %"),
    ],
)
def test_equal_is_said_of_equal_bits_alone(error, differing, words) -> None:
    assert words in agreement(history(RISING, (), error, differing))


def test_the_head_names_what_decided_first_and_the_speed(run: RunData) -> None:
    many = run.view.config.model_copy(
        update={"evaluation": run.view.config.evaluation.model_copy(update={"prompts": 256})}
    )
    # Engines compile in the first step.
    seconds = {"rollout": {1: 1e9, 2: run.history[2]["rollout/tokens"]}}
    rows = history(LEVEL, (0.375, 0.637), **{"rollout/tokens": run.history[2]["rollout/tokens"]})
    view = replace(run.view, config=many)
    shown = replace(run, view=view, history=rows, busy=dict.fromkeys(run.busy, 4321.0), seconds=seconds)
    result, _ = conclude(shown).paragraphs
    assert result.startswith("Learned: held-out accuracy 0.375 to 0.637. Reward 0.620 to 0.620, within chance. Rollout")
    assert result.endswith("4,321 s of tasks a step, 1 tokens a second of rollout.")
    assert conclude(replace(run, history=[])).paragraphs[0].startswith("Too short to tell. No step measured")


@pytest.mark.parametrize(
    ("heldout", "rewards", "action"),
    [
        ((0.1, 0.9), RISING, "fp8-grpo evaluate {place} --samples 2, then fp8-grpo export {place} --step 4"),
        ((0.9, 0.1), RISING, "loss.reference_kl"),
        ((0.9, 0.1), RISING[::-1], "lower training.learning_rate"),
        ((0.5, 0.5), LEVEL, "raise training.learning_rate"),
        ((1.0, 1.0), LEVEL, "choose harder problems"),
    ],
)
def test_one_action_follows_from_the_conclusion(run: RunData, heldout, rewards, action: str) -> None:
    *_, last = conclude(replace(run, history=history(rewards, heldout))).paragraphs
    assert last.startswith("Next: ")
    # The run does not lie below ./runs.
    assert action.format(place=run.view.folder) in last


def test_what_stopped_or_silenced_a_run_comes_before_its_conclusion(run: RunData) -> None:
    longer = replace(run, view=replace(run.view, config=run.view.config.model_copy(update={"steps": 80})))
    assert f"fp8-grpo resume {run.view.folder} trains the 76 steps" in conclude(longer).paragraphs[-1]
    cut_off = {"reward/groups_with_signal": 0.0, "rollout/cut_off_share": 1.0}
    silent = conclude(replace(longer, history=history(LEVEL, (0.5, 0.5), **cut_off))).paragraphs
    assert silent[0].startswith("Cut off: 100 % cut off")
    assert silent[1].startswith("Raise rollout.max_new_tokens")
    assert not any(words.startswith("Next: ") for words in silent)
