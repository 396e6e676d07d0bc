import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.rl.advantages import ESTIMATORS, Groups, informative, overlong_penalty

EPSILON = 1e-4


def slow_grpo(rewards, own, others):
    return (own - statistics.fmean(rewards)) / (statistics.stdev(rewards) + EPSILON)


def slow_dr_grpo(rewards, own, others):
    return own - statistics.fmean(rewards)


def slow_rloo(rewards, own, others):
    return own - statistics.fmean(others)


def slow_leave_one_out(rewards, own, others):
    std = statistics.stdev(others) if len(others) > 1 else 0.0
    return (own - statistics.fmean(others)) / (std + EPSILON if std else 1.0)


FORMULAS = {"grpo": slow_grpo, "dr_grpo": slow_dr_grpo, "rloo": slow_rloo, "leave_one_out": slow_leave_one_out}


def slow(formula, rewards, groups, keep):
    """Independent: one row at a time, Python's statistics module."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        mates = [j for j, other in enumerate(groups) if other == group and keep[j]]
        alone = not keep[i] or len(mates) < 2
        values, others = [rewards[j] for j in mates], [rewards[j] for j in mates if j != i]
        result.append(0.0 if alone else formula(values, reward, others))
    return result


def groups_of(rewards, groups=None, keep=None):
    n = len(rewards)
    labels, kept = torch.tensor(groups or [0] * n), torch.tensor(keep or [True] * n)
    return Groups.of(torch.tensor(rewards, dtype=torch.float64), labels, kept)


REWARDS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.1, 100.0])
ROWS = st.lists(st.tuples(REWARDS, st.integers(-2, 3), st.booleans()), min_size=1, max_size=16)


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=60)
@given(rows=ROWS)
def test_each_estimator_equals_an_independent_loop(name, rows):
    rewards, groups, keep = (list(column) for column in zip(*rows, strict=True))
    expected = slow(FORMULAS[name], rewards, groups, keep)
    found = ESTIMATORS[name](groups_of(rewards, groups, keep), EPSILON)
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=30)
@given(reward=st.floats(-1e3, 1e3), count=st.integers(1, 9))
def test_equal_rewards_and_lone_rows_give_exactly_zero(name, reward, count):
    scores = groups_of([reward] * count + [5.0], [4] * count + [8])
    assert ESTIMATORS[name](scores, EPSILON).count_nonzero() == 0


@pytest.mark.parametrize("rejected", [100.0, math.nan])
def test_a_rejected_row_moves_no_other(rejected):
    """Of rewards 100 and 1, one rejected, the kept one has no baseline (verl would give it -49.5)."""
    assert ESTIMATORS["dr_grpo"](groups_of([100.0, 1.0]), EPSILON).tolist() == [49.5, -49.5]
    for name, estimator in ESTIMATORS.items():
        found = estimator(groups_of([rejected, 1.0, 0.0], keep=[False, True, True]), EPSILON)
        alone = estimator(groups_of([1.0, 0.0]), EPSILON)
        assert found.tolist() == pytest.approx([0.0, *alone.tolist()]), name


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(1, 100), st.floats(0, 5))
def test_overlong_penalty_equals_the_piecewise_formula(lengths, buffer, penalty):
    start = 200 - buffer
    expected = [0.0 if n <= start else -penalty if n > 200 else penalty * (start - n) / buffer for n in lengths]
    assert overlong_penalty(torch.tensor(lengths), 200, buffer, penalty).tolist() == pytest.approx(expected)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_informative_groups_equal_an_independent_loop(rows):
    rewards, groups, keep = (torch.tensor(column) for column in zip(*rows, strict=True))
    values = {group: {r for r, g, k in rows if g == group and k} for group in range(4)}
    assert informative(rewards, groups, keep).tolist() == [len(values[g]) > 1 for _, g, _ in rows]
